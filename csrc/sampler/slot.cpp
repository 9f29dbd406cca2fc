#include "sampler/slot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace stretto {
namespace {
constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 1 << 21;
constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: pinned for every device
}  // namespace

Pool::Pool(int64_t keep, Pin pin, Unpin unpin) : keep_(keep), pin_(pin), unpin_(unpin), owner_(getpid()) {}

Pool::~Pool() {
    for (auto* slot : idle_) {
        free_memory(slot);
        delete slot;
    }
}

stretto_slot* Pool::take() {
    {
        std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            auto* slot = idle_.back();
            idle_.pop_back();
            idle_bytes_ -= slot->capacity;
            slot->error.clear();
            slot->pool = shared_from_this();
            return slot;
        }
    }
    auto* slot = new stretto_slot;
    slot->pool = shared_from_this();
    return slot;
}

void Pool::grow(stretto_slot* slot, int64_t bytes) {
    slot->bytes = bytes;
    if (bytes <= slot->capacity) return;
    free_memory(slot);
    // A little more than asked for, so that most later batches fit too.
    const int64_t align = bytes >= kHugePage ? kHugePage : kPage;
    const int64_t capacity = (bytes + bytes / 8 + align - 1) / align * align;
    void* data = std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(capacity));
    if (data == nullptr) throw std::bad_alloc();
    if (align == kHugePage) madvise(data, static_cast<size_t>(capacity), MADV_HUGEPAGE);
    slot->data = static_cast<uint8_t*>(data);
    slot->capacity = capacity;
    slot->pinned = pin_ != nullptr && pin_(data, static_cast<uint64_t>(capacity), kPortable) == 0;
}

void Pool::free_memory(stretto_slot* slot) {
    if (slot->pinned && unpin_ != nullptr) unpin_(slot->data);
    std::free(slot->data);
    slot->data = nullptr;
    slot->capacity = 0;
    slot->pinned = false;
}

void Pool::release(stretto_slot* slot) {
    if (getpid() != owner_) return;
    const auto self = std::move(slot->pool);  // keeps *this alive to the end of this function
    {
        std::lock_guard lock(mutex_);
        if (open_ && idle_bytes_ + slot->capacity <= keep_) {
            idle_.push_back(slot);
            idle_bytes_ += slot->capacity;
            return;
        }
    }
    free_memory(slot);
    delete slot;
}

void Pool::close() {
    if (getpid() != owner_) return;
    std::lock_guard lock(mutex_);
    open_ = false;
    for (auto* slot : idle_) {
        free_memory(slot);
        delete slot;
    }
    idle_.clear();
    idle_bytes_ = 0;
}

int64_t Pool::idle_bytes() {
    std::lock_guard lock(mutex_);
    return idle_bytes_;
}

}  // namespace stretto

#include "sampler/slot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <new>

namespace stretto {
namespace {
constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 1 << 21;
constexpr unsigned kPortable = 1;   // cudaHostRegisterPortable: pinned for every device
constexpr int64_t kLeastAhead = 2;  // batches with memory besides the reader's, however few were submitted

// Straight from the system, so that what is given back is gone and what was never written takes no memory.
void* map_aligned(size_t bytes, size_t align) {
    void* all = mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    auto* const first = static_cast<uint8_t*>(all);
    const size_t before = (align - reinterpret_cast<uintptr_t>(first) % align) % align;
    if (before > 0) munmap(first, before);
    munmap(first + before + bytes, align - before);
    return first + before;
}
}  // namespace

Pool::Pool(int64_t keep, Pin pin, Unpin unpin) : keep_(keep), pin_(pin), unpin_(unpin), owner_(getpid()) {}

Pool::~Pool() {
    for (auto* slot : idle_) {
        free_memory(slot);
        delete slot;
    }
}

stretto_slot* Pool::take_locked() {
    stretto_slot* slot;
    if (idle_.empty()) {
        slot = new stretto_slot;
        ++alive_;
    } else {
        slot = idle_.back();
        idle_.pop_back();
        idle_bytes_ -= slot->capacity;
        slot->error.clear();
    }
    slot->pool = shared_from_this();
    return slot;
}

stretto_slot* Pool::take() {
    std::lock_guard lock(mutex_);
    return take_locked();
}

// One batch less than was submitted has memory beside what the reader holds: the last one waits, sampled, for the slot
// the reader lets go of next. (A reader that holds none while it asks is as good as one that holds one.) Batches that
// come earlier and have none yet find theirs. The one the reader waits for never does.
bool Pool::may_have(int64_t number) const {
    if (waiting_ && number == next_) return true;
    const int64_t most = std::max<int64_t>(kept_, 1) + std::max<int64_t>(submitted_ - next_ - 1, kLeastAhead);
    const int64_t free = static_cast<int64_t>(idle_.size()) + std::max<int64_t>(most - alive_, 0);
    const int64_t earlier = number - next_ - std::distance(granted_.begin(), granted_.lower_bound(number));
    return free > earlier;
}

stretto_slot* Pool::take_for(int64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return number < next_ || may_have(number); });
    if (number < next_) return nullptr;
    granted_.insert(number);
    changed_.notify_all();
    return take_locked();
}

void Pool::progress(int64_t next, int64_t submitted) {
    {
        std::lock_guard lock(mutex_);
        if (next != next_) waiting_ = false;
        next_ = next;
        submitted_ = submitted;
        granted_.erase(granted_.begin(), granted_.lower_bound(next));
    }
    changed_.notify_all();
}

void Pool::asks(bool waits) {
    {
        std::lock_guard lock(mutex_);
        waiting_ = waits;
        kept_ = lent_;
    }
    changed_.notify_all();
}

void Pool::lend(stretto_slot* slot) {
    std::lock_guard lock(mutex_);
    slot->lent = true;
    ++lent_;
}

void Pool::grow(stretto_slot* slot, int64_t bytes) {
    slot->bytes = bytes;
    if (bytes <= slot->capacity) return;
    free_memory(slot);
    // A little more than asked for, so that most later batches fit too.
    const int64_t align = bytes >= kHugePage ? kHugePage : kPage;
    const int64_t capacity = (bytes + bytes / 8 + align - 1) / align * align;
    void* data = map_aligned(static_cast<size_t>(capacity), static_cast<size_t>(align));
    if (align == kHugePage) madvise(data, static_cast<size_t>(capacity), MADV_HUGEPAGE);
    slot->data = static_cast<uint8_t*>(data);
    slot->capacity = capacity;
    slot->pinned = pin_ != nullptr && pin_(data, static_cast<uint64_t>(capacity), kPortable) == 0;
}

void Pool::free_memory(stretto_slot* slot) {
    if (slot->pinned && unpin_ != nullptr) unpin_(slot->data);
    if (slot->data != nullptr) munmap(slot->data, static_cast<size_t>(slot->capacity));
    slot->data = nullptr;
    slot->capacity = 0;
    slot->pinned = false;
}

void Pool::release(stretto_slot* slot) {
    if (getpid() != owner_) return;
    const auto self = std::move(slot->pool);  // keeps *this alive to the end of this function
    bool keep;
    {
        std::lock_guard lock(mutex_);
        lent_ -= slot->lent;
        slot->lent = false;
        keep = open_ && idle_bytes_ + slot->capacity <= keep_;
        if (keep) {
            idle_.push_back(slot);
            idle_bytes_ += slot->capacity;
        } else {
            --alive_;
        }
    }
    changed_.notify_all();
    if (keep) return;
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
    alive_ -= static_cast<int64_t>(idle_.size());
    idle_.clear();
    idle_bytes_ = 0;
}

int64_t Pool::idle_bytes() {
    std::lock_guard lock(mutex_);
    return idle_bytes_;
}

}  // namespace stretto

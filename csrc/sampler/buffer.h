// A growing array that is never zeroed: the sampler writes each entry once, straight after making room for it.
//
// Large ones are mapped: they grow without a copy and leave no holes in a thread's heap, and pages that were never
// written take no memory.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace stretto {

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)),
          capacity_(std::exchange(other.capacity_, 0)) {}
    ~Buffer() { is_mapped(capacity_) ? void(munmap(data_, bytes(capacity_))) : std::free(data_); }

    T* data() { return data_; }
    const T* data() const { return data_; }
    int64_t size() const { return size_; }
    T& operator[](int64_t i) { return data_[i]; }
    const T& operator[](int64_t i) const { return data_[i]; }

    void clear() { size_ = 0; }
    void set_size(int64_t size) { size_ = size; }

    // Room for `extra` more entries, which may then be written through data() + size().
    void reserve(int64_t extra) {
        const int64_t want = size_ + extra;
        if (want <= capacity_) return;
        if (want > kMost) throw std::bad_alloc();
        int64_t capacity = capacity_ < 1024 ? 1024 : capacity_;
        while (capacity < want) capacity += capacity / 2;
        void* grown = is_mapped(capacity) ? remap(capacity) : std::realloc(static_cast<void*>(data_), bytes(capacity));
        if (grown == nullptr) throw std::bad_alloc();
        data_ = static_cast<T*>(grown);
        capacity_ = capacity;
    }

    void push(T value) {
        reserve(1);
        data_[size_++] = value;
    }

  private:
#ifdef __SANITIZE_THREAD__  // it does not see mappings move, and takes what was there before for this buffer's
    static constexpr bool kMoves = false;
#else
    static constexpr bool kMoves = true;
#endif
    static constexpr size_t kMapped = 256 << 10;
    static constexpr int64_t kMost = INT64_MAX / 16;  // entries; beyond, growing and counting bytes would overflow

    static size_t bytes(int64_t capacity) { return static_cast<size_t>(capacity) * sizeof(T); }
    static bool is_mapped(int64_t capacity) { return bytes(capacity) >= kMapped; }

    // The contents in a mapping of that capacity; nullptr, and they stay where they are, where there is no memory.
    void* remap(int64_t capacity) {
        void* grown = is_mapped(capacity_) && kMoves
                          ? mremap(data_, bytes(capacity_), bytes(capacity), MREMAP_MAYMOVE)
                          : mmap(nullptr, bytes(capacity), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (grown == MAP_FAILED) return nullptr;
        if (!is_mapped(capacity_) || !kMoves) {
            if (size_ > 0) std::memcpy(grown, data_, bytes(size_));
            is_mapped(capacity_) ? void(munmap(data_, bytes(capacity_))) : std::free(data_);
        }
        return grown;
    }

    T* data_ = nullptr;
    int64_t size_ = 0;
    int64_t capacity_ = 0;
};

}  // namespace stretto

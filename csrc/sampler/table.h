// From a node's id to its position in the batch, without clearing anything between batches.
//
// An entry holds base + position, and base grows by the number of nodes after every batch: whatever is below the
// current base belongs to an earlier batch. DirectTable has an entry per node of the graph (4 bytes); HashTable serves
// graphs for which that would leave the cache anyway, and disjoint sampling, whose key is a node in a tree.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "sampler/random.h"

namespace stretto {

class Generation {
  public:
    // Starts a batch; `used` entries were taken by the last one. True when every entry must be cleared first.
    bool advance(uint32_t used) {
        base_ += used;
        if (base_ < kLast) return false;
        base_ = 1;
        return true;
    }
    uint32_t base() const { return base_; }

  private:
    static constexpr uint32_t kLast = 1u << 31;  // leaves 2^31 positions to the batch that starts just below it
    uint32_t base_ = 1;
};

// Where a key stands after insert(), and whether it is there for the first time.
struct Place {
    uint32_t position;
    uint32_t is_new;
};

class DirectTable {
  public:
    explicit DirectTable(int64_t num_nodes) {
        bytes_ = static_cast<size_t>(std::max<int64_t>(num_nodes, 1)) * sizeof(uint32_t);
        if (bytes_ < kLargePage / 2) {
            entries_ = static_cast<uint32_t*>(std::calloc(bytes_, 1));
        } else {  // in large pages, where the system lends them: every edge of a batch reads it at some place
            bytes_ = (bytes_ + kLargePage - 1) / kLargePage * kLargePage;
            entries_ = static_cast<uint32_t*>(std::aligned_alloc(kLargePage, bytes_));
            if (entries_ != nullptr) {
                madvise(entries_, bytes_, MADV_HUGEPAGE);
                std::memset(entries_, 0, bytes_);
            }
        }
        if (entries_ == nullptr) throw std::bad_alloc();
    }
    ~DirectTable() { std::free(entries_); }
    DirectTable(const DirectTable&) = delete;
    DirectTable& operator=(const DirectTable&) = delete;

    void begin(uint32_t used) {
        if (generation_.advance(used)) std::memset(entries_, 0, bytes_);
    }
    void reserve(int64_t) {}

    // What a loop over many keys needs at hand: stores to other arrays cannot change it.
    struct Entries {
        void prefetch(uint64_t key) const { __builtin_prefetch(entries + key, 1); }
        // The position of key; where it has none yet it gets `fresh`, which is the number of those that have. Entries
        // of earlier batches are below base, so that their distance wraps around to more than any position. Written
        // either way: new or known is a coin toss that no processor guesses, and a wrong guess costs more than the rest
        // of an edge.
        Place insert(uint64_t key, uint32_t fresh) const {
            const uint32_t position = std::min(entries[key] - base, fresh);
            entries[key] = base + position;
            return {position, position == fresh};
        }
        uint32_t* entries;
        uint32_t base;
    };
    Entries entries() { return {entries_, generation_.base()}; }
    Place insert(uint64_t key, uint32_t fresh) { return entries().insert(key, fresh); }
    // The position of key, or -1.
    int64_t find(uint64_t key) const {
        const uint32_t entry = entries_[key];
        return entry >= generation_.base() ? static_cast<int64_t>(entry - generation_.base()) : -1;
    }

  private:
    static constexpr size_t kLargePage = size_t{1} << 21;
    uint32_t* entries_;
    size_t bytes_;
    Generation generation_;
};

class HashTable {
  public:
    HashTable() { allocate(1 << 12); }
    ~HashTable() { std::free(entries_); }
    HashTable(const HashTable&) = delete;
    HashTable& operator=(const HashTable&) = delete;

    void begin(uint32_t used) {
        count_ = 0;
        if (generation_.advance(used)) std::memset(static_cast<void*>(entries_), 0, (mask_ + 1) * sizeof(Entry));
    }
    // Room for `extra` more keys at a load of at most one half.
    void reserve(int64_t extra) {
        uint64_t size = mask_ + 1;
        while (size < 2 * static_cast<uint64_t>(count_ + extra)) size *= 2;
        if (size == mask_ + 1) return;
        Entry* old = entries_;
        const uint64_t old_size = mask_ + 1;
        allocate(size);
        for (uint64_t i = 0; i < old_size; ++i) {
            if (old[i].value < generation_.base()) continue;
            entries_[probe(old[i].key)] = old[i];
        }
        std::free(old);
    }
    void prefetch(uint64_t key) const { __builtin_prefetch(entries_ + (mix(key) & mask_), 1); }
    // As of a DirectTable.
    struct Entries {
        void prefetch(uint64_t key) const { table.prefetch(key); }
        Place insert(uint64_t key, uint32_t fresh) const { return table.insert(key, fresh); }
        HashTable& table;
    };
    Entries entries() { return {*this}; }
    Place insert(uint64_t key, uint32_t fresh) {
        Entry& entry = entries_[probe(key)];
        const uint32_t base = generation_.base();
        if (entry.value >= base) return {entry.value - base, 0};
        entry.key = key;
        entry.value = base + fresh;
        ++count_;
        return {fresh, 1};
    }
    int64_t find(uint64_t key) const {
        const Entry& entry = entries_[probe(key)];
        return entry.value >= generation_.base() ? static_cast<int64_t>(entry.value - generation_.base()) : -1;
    }

  private:
    struct Entry {
        uint64_t key;
        uint32_t value;
    };

    void allocate(uint64_t size) {
        auto* fresh = static_cast<Entry*>(std::calloc(size, sizeof(Entry)));
        if (fresh == nullptr) throw std::bad_alloc();
        entries_ = fresh;
        mask_ = size - 1;
    }
    // Where key is, or the free entry where it belongs.
    uint64_t probe(uint64_t key) const {
        uint64_t i = mix(key) & mask_;
        while (entries_[i].value >= generation_.base() && entries_[i].key != key) i = (i + 1) & mask_;
        return i;
    }

    Entry* entries_ = nullptr;
    uint64_t mask_ = 0;
    int64_t count_ = 0;
    Generation generation_;
};

}  // namespace stretto

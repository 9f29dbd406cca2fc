// Slots: the memory a batch is delivered in, kept and reused.
//
// One block of memory holds everything of a batch, so that it can be sent to a device in one copy. Whoever got a slot
// owns it until stretto_slot_release(); it then goes back to its pool, or is freed where the pool is closed.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace stretto {
class Pool;
}

struct stretto_slot {
    std::shared_ptr<stretto::Pool> pool;
    uint8_t* data = nullptr;
    int64_t capacity = 0;
    int64_t bytes = 0;
    bool pinned = false;
    std::vector<int64_t> table;
    std::string error;  // not empty: preparing this batch failed
};

namespace stretto {

class Pool : public std::enable_shared_from_this<Pool> {
  public:
    using Pin = int (*)(void*, uint64_t, unsigned);
    using Unpin = int (*)(void*);

    // Keeps at most `keep` bytes for reuse.
    Pool(int64_t keep, Pin pin, Unpin unpin);
    ~Pool();

    stretto_slot* take();
    // At least `bytes` of memory; throws std::bad_alloc.
    void grow(stretto_slot* slot, int64_t bytes);
    void release(stretto_slot* slot);
    void close();  // from now on released slots are freed
    int64_t idle_bytes();

  private:
    void free_memory(stretto_slot* slot);

    std::mutex mutex_;
    std::vector<stretto_slot*> idle_;
    int64_t idle_bytes_ = 0;
    const int64_t keep_;
    const Pin pin_;
    const Unpin unpin_;
    bool open_ = true;
    const int owner_;  // process id; a forked child leaves the pool alone
};

class Sampler;
struct Scratch;
// Lays a sampled batch out in the slot and copies the rows of every slice into it.
void assemble(const Sampler& sampler, const Scratch& scratch, Pool& pool, stretto_slot* slot);

}  // namespace stretto

// Slots: the memory a batch is delivered in, kept and reused.
//
// One block of memory holds everything of a batch, so that it can be sent to a device in one copy. Whoever got a slot
// owns it until stretto_slot_release(); it then goes back to its pool, or is freed where the pool is closed.
//
// An engine's pool is sparing: a batch that has been sampled waits for a slot that comes back rather than take a new
// one, except for as many as keep the reader fed. A batch is mostly features, and sampling goes on without them.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"

namespace stretto {
class Pool;
}

// DLManagedTensor as DLPack lays it out, by which a tensor takes over memory that is not its own.
struct stretto_tensor {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
    void* context;
    void (*deleter)(stretto_tensor*);
};

struct stretto_slot {
    std::shared_ptr<stretto::Pool> pool;
    uint8_t* data = nullptr;
    int64_t capacity = 0;
    int64_t bytes = 0;
    bool pinned = false;
    bool lent = false;  // to the reader of an engine
    std::vector<int64_t> table;
    std::string error;  // not empty: preparing this batch failed
    stretto_tensor tensor{};
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
    // Memory for batch `number` of an engine, as soon as there is an idle slot or room for one more; nullptr where the
    // batch is no longer wanted.
    stretto_slot* take_for(int64_t number);
    // What the reader is at: batches before `next` were handed out or dropped, those before `submitted` are to come.
    void progress(int64_t next, int64_t submitted);
    void asks(bool waits);  // the reader asks for the next batch, holding what it holds
    void lend(stretto_slot* slot);
    // At least `bytes` of memory; throws std::bad_alloc.
    void grow(stretto_slot* slot, int64_t bytes);
    void release(stretto_slot* slot);
    void close();  // from now on released slots are freed
    int64_t idle_bytes();

  private:
    void free_memory(stretto_slot* slot);
    stretto_slot* take_locked();
    bool may_have(int64_t number) const;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<stretto_slot*> idle_;
    int64_t idle_bytes_ = 0;
    int64_t alive_ = 0, lent_ = 0;      // slots there are, and those of them the reader has
    int64_t kept_ = 0;                  // those it had when it last asked for more
    int64_t next_ = 0, submitted_ = 0;  // as of progress()
    bool waiting_ = false;              // the reader, for batch next_
    std::set<int64_t> granted_;         // batches from next_ on that have a slot
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

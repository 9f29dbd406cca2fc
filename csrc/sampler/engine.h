// The engine: threads that turn submitted seeds into batches, delivered in the order of submission.
//
// Sleeping threads wait on condition variables and cost nothing. What bounds the work ahead is bytes: a thread starts
// on a batch only while those ready or under way, each reckoned at the size of the largest so far, leave room for it.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sampler/sampler.h"
#include "sampler/slot.h"

namespace stretto {

class Engine {
  public:
    Engine(Sampler& sampler, int threads, int64_t memory, Pool::Pin pin, Pool::Unpin unpin);
    ~Engine();

    void submit(const stretto_seeds& seeds);
    // 1: *slot is the next batch (its error may be set); 0: not within the time; -1: nothing was submitted.
    int next(int64_t timeout_ms, stretto_slot** slot);
    void cancel();
    void state(int64_t* out);
    bool foreign() const;  // created by another process, before a fork

  private:
    struct Task {
        int64_t number;
        uint64_t seed, epoch, batch;
        std::vector<std::vector<int64_t>> seeds, times;
        std::vector<bool> timed;
    };

    void work();
    void sample(const Task& task, Scratch& scratch);
    bool room() const;

    Sampler& sampler_;
    const int64_t memory_;
    const int owner_;
    std::shared_ptr<Pool> pool_;
    std::mutex mutex_;
    std::condition_variable work_, ready_;
    std::deque<Task> waiting_;
    std::map<int64_t, stretto_slot*> done_;
    int64_t submitted_ = 0, delivered_ = 0;  // numbers of the next batch in and out
    int64_t cancelled_ = 0;                  // batches with smaller numbers are thrown away
    int64_t under_way_ = 0, done_bytes_ = 0, largest_ = 0, peak_ = 0, prepared_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace stretto

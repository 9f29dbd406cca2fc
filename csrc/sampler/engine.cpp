#include "sampler/engine.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>

namespace stretto {

Engine::Engine(Sampler& sampler, int threads, int64_t memory, Pool::Pin pin, Pool::Unpin unpin)
    : sampler_(sampler), memory_(memory), owner_(getpid()), pool_(std::make_shared<Pool>(memory, pin, unpin)) {
    // Signals belong to the interpreter's threads: workers inherit a mask that blocks them all.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (threads_.empty()) throw;  // otherwise the threads there are do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Engine::~Engine() {
    cancel();
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
    for (auto& [number, slot] : done_) pool_->release(slot);
    pool_->close();
}

bool Engine::foreign() const { return getpid() != owner_; }

void Engine::submit(const stretto_seeds& seeds) {
    Task task;
    task.seed = seeds.seed;
    task.epoch = seeds.epoch;
    task.batch = seeds.batch;
    for (size_t t = 0; t < sampler_.node_types.size(); ++t) {
        const int64_t n = seeds.counts[t];
        task.seeds.emplace_back(seeds.seeds[t], seeds.seeds[t] + n);
        task.timed.push_back(seeds.times[t] != nullptr);
        task.times.emplace_back();
        if (seeds.times[t] != nullptr) task.times.back().assign(seeds.times[t], seeds.times[t] + n);
    }
    {
        std::lock_guard lock(mutex_);
        task.number = submitted_++;
        waiting_.push_back(std::move(task));
        pool_->progress(delivered_, submitted_);
    }
    work_.notify_one();
}

// Called with the lock held. The very next batch is always allowed, or nothing would ever move.
bool Engine::room() const {
    if (under_way_ == 0 && done_.empty()) return true;
    return done_bytes_ + (under_way_ + 1) * largest_ <= memory_;
}

void Engine::work() {
    std::unique_ptr<Scratch> scratch;
    std::unique_lock lock(mutex_);
    while (true) {
        work_.wait(lock, [&] { return stop_ || (!waiting_.empty() && room()); });
        if (stop_) break;
        const Task task = std::move(waiting_.front());
        waiting_.pop_front();
        ++under_way_;
        lock.unlock();

        stretto_slot* slot = nullptr;
        try {
            if (!scratch) scratch = sampler_.borrow();
            sample(task, *scratch);
            slot = pool_->take_for(task.number);
            if (slot != nullptr) assemble(sampler_, *scratch, *pool_, slot);
        } catch (const std::exception& problem) {
            if (slot == nullptr) slot = pool_->take();
            slot->error = problem.what();
            slot->bytes = 0;
        }

        lock.lock();
        --under_way_;
        if (task.number < cancelled_) {
            lock.unlock();
            if (slot != nullptr) pool_->release(slot);
            lock.lock();
        } else {
            done_[task.number] = slot;
            done_bytes_ += slot->capacity;
            largest_ = std::max(largest_, slot->capacity);
            peak_ = std::max(peak_, done_bytes_ + under_way_ * largest_);
            ++prepared_;
            if (task.number == delivered_) ready_.notify_all();
        }
        work_.notify_all();  // there may be room now for another thread
    }
    lock.unlock();
    if (scratch) sampler_.give_back(std::move(scratch));
}

void Engine::sample(const Task& task, Scratch& scratch) {
    std::vector<const int64_t*> seeds, times;
    std::vector<int64_t> counts;
    for (size_t t = 0; t < task.seeds.size(); ++t) {
        seeds.push_back(task.seeds[t].data());
        counts.push_back(static_cast<int64_t>(task.seeds[t].size()));
        times.push_back(task.timed[t] ? task.times[t].data() : nullptr);
    }
    sampler_.sample({task.seed, task.epoch, task.batch, seeds.data(), counts.data(), times.data()}, scratch);
}

int Engine::next(int64_t timeout_ms, stretto_slot** slot) {
    pool_->asks(timeout_ms > 0);
    std::unique_lock lock(mutex_);
    if (delivered_ == submitted_) return -1;
    const bool there = ready_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                       [&] { return !done_.empty() && done_.begin()->first == delivered_; });
    if (!there) return 0;
    *slot = done_.begin()->second;
    done_.erase(done_.begin());
    done_bytes_ -= (*slot)->capacity;
    ++delivered_;
    pool_->lend(*slot);
    pool_->progress(delivered_, submitted_);
    lock.unlock();
    work_.notify_all();
    return 1;
}

void Engine::cancel() {
    std::vector<stretto_slot*> dropped;
    {
        std::lock_guard lock(mutex_);
        waiting_.clear();
        for (auto& [number, slot] : done_) dropped.push_back(slot);
        done_.clear();
        done_bytes_ = 0;
        cancelled_ = delivered_ = submitted_;
        pool_->progress(delivered_, submitted_);
    }
    for (auto* slot : dropped) pool_->release(slot);
    work_.notify_all();
}

void Engine::state(int64_t* out) {
    out[1] = pool_->idle_bytes();
    std::lock_guard lock(mutex_);
    out[0] = done_bytes_;
    out[2] = peak_;
    out[3] = prepared_;
}

}  // namespace stretto

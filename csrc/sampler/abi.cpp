// The sampler's part of the C ABI: exceptions become statuses here.
#include "abi.h"

#include <cmath>
#include <exception>

#include "core/error.h"
#include "sampler/engine.h"

struct stretto_sampler {
    explicit stretto_sampler(const stretto_sampling_plan& plan)
        : sampler(plan), pool(std::make_shared<stretto::Pool>(kKept, nullptr, nullptr)) {}
    ~stretto_sampler() { pool->close(); }

    static constexpr int64_t kKept = int64_t{256} << 20;  // memory kept for reuse between direct calls
    stretto::Sampler sampler;
    std::shared_ptr<stretto::Pool> pool;
};

struct stretto_engine {
    stretto::Engine engine;
};

namespace {

// Runs body(); an exception's text goes to stretto_error().
template <class Body>
int guarded(const char* what, Body&& body) {
    try {
        return body();
    } catch (const std::exception& problem) {
        return stretto::error("%s: %s", what, problem.what());
    }
}

template <class T>
int running_sums(const int64_t* colptr, int64_t num_targets, const T* weight, double* running) {
    const int64_t num_edges = colptr[num_targets];
    if (colptr[0] != 0) return stretto::error("sampler: colptr does not start at 0");
    for (int64_t v = 0; v < num_targets; ++v) {
        if (colptr[v + 1] < colptr[v] || colptr[v + 1] > num_edges)
            return stretto::error("sampler: colptr does not rise from node %lld to the next",
                                  static_cast<long long>(v));
        double sum = 0;
        for (int64_t e = colptr[v]; e < colptr[v + 1]; ++e) {
            if (!std::isfinite(weight[e]) || weight[e] < 0)
                return stretto::error("sampler: the weight of an edge of node %lld is %g, wanted a finite number >= 0",
                                      static_cast<long long>(v), static_cast<double>(weight[e]));
            running[e] = sum += static_cast<double>(weight[e]);
        }
        if (!std::isfinite(sum))
            return stretto::error("sampler: the weights of the edges of node %lld have no finite sum",
                                  static_cast<long long>(v));
    }
    return 0;
}

}  // namespace

extern "C" {

stretto_sampler* stretto_sampler_create(const stretto_sampling_plan* plan) {
    stretto_sampler* out = nullptr;
    guarded("sampler", [&] {
        out = new stretto_sampler(*plan);
        return 0;
    });
    return out;
}

void stretto_sampler_destroy(stretto_sampler* sampler) { delete sampler; }

int stretto_sampler_weights(const int64_t* colptr, int64_t num_targets, const void* weight, int dtype,
                            double* running) {
    return dtype == STRETTO_F32 ? running_sums(colptr, num_targets, static_cast<const float*>(weight), running)
                                : running_sums(colptr, num_targets, static_cast<const double*>(weight), running);
}

int stretto_sampler_sample(stretto_sampler* sampler, const stretto_seeds* seeds, stretto_slot** slot) {
    return guarded("sampler", [&] {
        auto scratch = sampler->sampler.borrow();
        auto* out = sampler->pool->take();
        try {
            sampler->sampler.sample(*seeds, *scratch);
            stretto::assemble(sampler->sampler, *scratch, *sampler->pool, out);
        } catch (...) {
            sampler->pool->release(out);
            sampler->sampler.give_back(std::move(scratch));
            throw;
        }
        sampler->sampler.give_back(std::move(scratch));
        *slot = out;
        return 0;
    });
}

int64_t stretto_slot_table(stretto_slot* slot, int64_t* table, int64_t size) {
    const auto n = static_cast<int64_t>(slot->table.size());
    for (int64_t i = 0; i < n && i < size; ++i) table[i] = slot->table[static_cast<size_t>(i)];
    return n;
}

void stretto_slot_release(stretto_slot* slot) { slot->pool->release(slot); }

void* stretto_slot_tensor(stretto_slot* slot) {
    auto& tensor = slot->tensor;
    tensor.data = slot->data;
    tensor.device_type = 1;  // the processor
    tensor.ndim = 1;
    tensor.type_code = 1;  // unsigned
    tensor.type_bits = 8;
    tensor.type_lanes = 1;
    tensor.shape = &slot->bytes;
    tensor.context = slot;
    tensor.deleter = [](stretto_tensor* self) { stretto_slot_release(static_cast<stretto_slot*>(self->context)); };
    return &tensor;
}

stretto_engine* stretto_engine_create(stretto_sampler* sampler, int threads, int64_t memory,
                                      int (*pin)(void*, uint64_t, unsigned), int (*unpin)(void*)) {
    stretto_engine* out = nullptr;
    guarded("engine", [&] {
        out = new stretto_engine{{sampler->sampler, threads, memory, pin, unpin}};
        return 0;
    });
    return out;
}

int stretto_engine_submit(stretto_engine* engine, const stretto_seeds* seeds) {
    if (engine->engine.foreign()) return stretto::error("engine: used in another process than its own, after a fork");
    return guarded("engine", [&] {
        engine->engine.submit(*seeds);
        return 0;
    });
}

int stretto_engine_next(stretto_engine* engine, int64_t timeout_ms, stretto_slot** slot) {
    if (engine->engine.foreign()) return stretto::error("engine: used in another process than its own, after a fork");
    return guarded("engine", [&] {
        stretto_slot* out = nullptr;
        const int status = engine->engine.next(timeout_ms, &out);
        if (status < 0) return stretto::error("engine: no batch was submitted");
        if (status == 0) return 0;
        if (!out->error.empty()) {
            const int failed = stretto::error("sampler: %s", out->error.c_str());
            out->pool->release(out);
            return failed;
        }
        *slot = out;
        return 1;
    });
}

void stretto_engine_cancel(stretto_engine* engine) {
    if (!engine->engine.foreign()) engine->engine.cancel();
}

// In a forked child the threads do not exist and the locks may be held: the memory is left to the end of the process.
void stretto_engine_destroy(stretto_engine* engine) {
    if (!engine->engine.foreign()) delete engine;
}

void stretto_engine_state(stretto_engine* engine, int64_t* state) {
    if (!engine->engine.foreign()) engine->engine.state(state);
}

}  // extern "C"

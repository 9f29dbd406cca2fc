#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <link.h>

#include <cstring>
#endif

namespace stretto {
namespace {

// The entry point GCC emits for `#pragma omp parallel`; libgomp and LLVM's libomp both export it.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel borrowed = nullptr;
std::atomic<bool> forked{false};

#if defined(__linux__)
// Looks into every loaded OpenMP runtime, also those loaded privately.
int find_openmp(struct dl_phdr_info* info, size_t, void* found) {
    const char* name = info->dlpi_name;
    if (!name || !(std::strstr(name, "libgomp") || std::strstr(name, "libomp") || std::strstr(name, "libiomp")))
        return 0;
    void* handle = dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
    if (!handle) return 0;
    *static_cast<void**>(found) = dlsym(handle, "GOMP_parallel");
    dlclose(handle);
    return *static_cast<void**>(found) != nullptr;
}
#endif

struct Borrow {
    Borrow() {
        void* symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#if defined(__linux__)
        if (!symbol) dl_iterate_phdr(find_openmp, &symbol);
#endif
        borrowed = reinterpret_cast<GompParallel>(symbol);
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
    }
};
const Borrow at_load;

struct Team {
    std::atomic<int64_t> next{0};
    int64_t num_tasks;
    void (*body)(void*, int64_t);
    void* context;

    void work() {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) body(context, task);
    }
};

}  // namespace

void parallel_tasks(int64_t num_tasks, int threads, void (*body)(void*, int64_t), void* context) {
    if (threads > num_tasks) threads = static_cast<int>(num_tasks);
    if (threads <= 1) {
        for (int64_t task = 0; task < num_tasks; ++task) body(context, task);
        return;
    }
    Team team;
    team.num_tasks = num_tasks;
    team.body = body;
    team.context = context;
    if (borrowed && !forked) {
        borrowed([](void* t) { static_cast<Team*>(t)->work(); }, &team, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads - 1));
    for (int t = 1; t < threads; ++t) others.emplace_back([&team] { team.work(); });
    team.work();
    for (auto& other : others) other.join();
}

void on_each_thread(int threads, void (*body)()) {
    if (threads <= 1)
        body();
    else if (borrowed && !forked)
        borrowed([](void* b) { (*static_cast<void (**)()>(b))(); }, &body, static_cast<unsigned>(threads), 0);
}

const char* threading_name() { return borrowed && !forked ? "openmp (borrowed)" : "std::thread"; }

}  // namespace stretto

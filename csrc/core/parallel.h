// Loops over tasks on several threads.
//
// The threads are those of the OpenMP runtime that the process has already loaded (torch's), found by name at run time;
// a second runtime is never brought in. Where none is loaded, and in a forked child (an OpenMP pool does not survive
// fork), std::thread is used. Which thread runs which task is left open: no kernel may depend on it.
#pragma once
#include <cstdint>

namespace stretto {

// Calls body(context, task) for every task in [0, num_tasks), on up to `threads` threads.
void parallel_tasks(int64_t num_tasks, int threads, void (*body)(void*, int64_t), void* context);

// The same for a callable: parallel_for(n, threads, [&](int64_t task) { ... }).
template <class Body>
inline void parallel_for(int64_t num_tasks, int threads, Body&& body) {
    using B = Body;
    parallel_tasks(
        num_tasks, threads, [](void* context, int64_t task) { (*static_cast<B*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// Calls body() once on each of `threads` threads of the runtime's pool: those its next loops run on. Does nothing
// where the threads are not kept from one loop to the next.
void on_each_thread(int threads, void (*body)());

const char* threading_name();

}  // namespace stretto

#include "core/cpu.h"

#include <atomic>
#include <cstring>
#include <string>

#include "abi.h"
#include "core/denormals.h"
#include "core/error.h"
#include "core/parallel.h"

namespace stretto {
namespace {

struct Isa {
    const char* name;
    const KernelTable* (*table)();
    bool (*runs_here)();
};

// Best first.
const Isa all_isas[] = {
#if defined(STRETTO_HAS_avx512)
    {"avx512", avx512::table,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma");
     }},
#endif
#if defined(STRETTO_HAS_avx2)
    {"avx2", avx2::table,
     [] {
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
     }},
#endif
    {"baseline", baseline::table, [] { return true; }},
};

const Isa* best() {
    for (const Isa& isa : all_isas)
        if (isa.runs_here()) return &isa;
    return &all_isas[sizeof(all_isas) / sizeof(all_isas[0]) - 1];
}

std::atomic<const Isa*> in_use{best()};

}  // namespace

const KernelTable& kernels() { return *in_use.load(std::memory_order_relaxed)->table(); }

}  // namespace stretto

extern "C" {

const char* stretto_version(void) { return "0.1.0"; }

const char* stretto_threading(void) { return stretto::threading_name(); }

int stretto_flush_denormals(int on, int threads) {
    static thread_local stretto::FloatMode before;
    if (on)
        stretto::on_each_thread(threads, [] {
            before = stretto::float_mode();
            stretto::set_float_mode(stretto::flushing(before));
        });
    else
        stretto::on_each_thread(threads, [] { stretto::set_float_mode(before); });
    return 0;
}

const char* stretto_isa(void) { return stretto::in_use.load()->name; }

const char* stretto_isas(void) {
    static const std::string names = [] {
        std::string text;
        for (const auto& isa : stretto::all_isas)
            if (isa.runs_here()) {
                if (!text.empty()) text += ' ';
                text += isa.name;
            }
        return text;
    }();
    return names.c_str();
}

int stretto_set_isa(const char* name) {
    for (const auto& isa : stretto::all_isas)
        if (!std::strcmp(isa.name, name) && isa.runs_here()) {
            stretto::in_use = &isa;
            return 0;
        }
    return stretto::error("instruction set '%s' is not available, wanted one of: %s", name, stretto_isas());
}

}  // extern "C"

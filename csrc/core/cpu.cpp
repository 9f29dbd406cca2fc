#include "core/cpu.h"

#include <atomic>
#include <cstring>
#include <string>

#include "abi.h"
#include "core/error.h"
#include "core/parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

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

void stretto_advise_huge(void* data, int64_t bytes) {
#if defined(__linux__)
    // Only whole huge pages inside the buffer; a refusal by the kernel costs nothing but the gain.
    const uintptr_t huge = uintptr_t{1} << 21, begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) & ~(huge - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(huge - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

}  // extern "C"

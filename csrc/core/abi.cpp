// The kernel half of the C ABI: packs the arguments and calls the table of the instruction set in use.
#include "abi.h"

#include "core/cpu.h"
#include "core/error.h"

using namespace stretto;

namespace {

int finish(const char* name, int status) { return status == -2 ? error("%s: out of memory", name) : status; }

}  // namespace

extern "C" {

#define KERNEL(name, types, ...)                                                                                 \
    int stretto_##name(STRETTO_EACH(STRETTO_PARAMETER, __VA_ARGS__) int threads) {                               \
        if (dtype < 0 || dtype >= types) return error(#name ": dtype %d is not one of 0..%d", dtype, types - 1); \
        return finish(#name, kernels().name[dtype]({STRETTO_EACH(STRETTO_NAME, __VA_ARGS__) threads}));          \
    }
#define UNTYPED_KERNEL(name, ...)                                                                   \
    int stretto_##name(STRETTO_EACH(STRETTO_PARAMETER, __VA_ARGS__) int threads) {                  \
        return finish(#name, kernels().name[0]({STRETTO_EACH(STRETTO_NAME, __VA_ARGS__) threads})); \
    }
#include "kernels.def"

}  // extern "C"

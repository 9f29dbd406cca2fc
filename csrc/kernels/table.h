// What kernels.def says of the kernels: their arguments, and the table of them that each instruction set has.
#pragma once
#include <cstdint>

#include "abi.h"

namespace stretto {

#define KERNEL(name, types, ...)                 \
    struct name##_args {                         \
        STRETTO_EACH(STRETTO_FIELD, __VA_ARGS__) \
        int threads;                             \
    };
#include "kernels.def"

struct KernelTable {
#define KERNEL(name, types, ...) int (*name[types])(const name##_args&);  // by stretto_dtype
#include "kernels.def"
};

namespace baseline {
const KernelTable* table();
}
namespace avx2 {
const KernelTable* table();
}
namespace avx512 {
const KernelTable* table();
}

}  // namespace stretto

// What a kernel is compiled for, at the end of its file. Those under by_type/ are compiled once for each type.
#ifdef STRETTO_TYPE
#define FOR_FLOATS(name) template int name<STRETTO_TYPE>(const name##_args&);
#else
#define FOR_WIDE(name)                            \
    template int name<float>(const name##_args&); \
    template int name<double>(const name##_args&);
#define FOR_FLOATS(name)                         \
    FOR_WIDE(name)                               \
    template int name<bf16>(const name##_args&); \
    template int name<f16>(const name##_args&);
#endif

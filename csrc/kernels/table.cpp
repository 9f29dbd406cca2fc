// The kernel table of this instruction set.
#include "kernels/table.h"

#include "kernels/simd.h"

namespace stretto::STRETTO_ISA {

#define KERNEL(name, types, ...) \
    template <class T>           \
    int name(const name##_args&);
#define UNTYPED_KERNEL(name, ...) int name(const name##_args&);
#include "kernels.def"

#define TYPES_2(name) {name<float>, name<double>}
#define TYPES_4(name) {name<float>, name<double>, name<bf16>, name<f16>}

const KernelTable* table() {
    static constexpr KernelTable all = {
#define KERNEL(name, types, ...) TYPES_##types(name),
#define UNTYPED_KERNEL(name, ...) {name},
#include "kernels.def"
    };
    return &all;
}

}  // namespace stretto::STRETTO_ISA

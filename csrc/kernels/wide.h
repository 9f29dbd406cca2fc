// Long sums: a block of terms is added up in the type of the values, blocks in fp64. A million terms then err no more
// than one block of them.
#pragma once
#include "kernels/simd.h"

namespace stretto::STRETTO_ISA {

constexpr int64_t summed_at_once = 128;  // terms that are added one after the other: they err by a few roundings

// into += part, n values each. Never inlined: it is called once in a block, by loops that need their registers.
template <class A>
__attribute__((noinline)) void add_wide(const A* part, int64_t n, double* into) {
    for (int64_t k = 0; k < n; ++k) into[k] += static_cast<double>(part[k]);
}

// stored <- sums, rounded once
template <class A>
STRETTO_INLINE void narrow_sums(const double* sums, int64_t n, A* stored) {
    for (int64_t k = 0; k < n; ++k) stored[k] = static_cast<A>(sums[k]);
}

// sums += the sums over the rows of x [rows, width], a block of rows, of which each chain of additions gets every
// eighth: neighbours are often alike, and a sum of like terms errs the more the longer it is.
template <class T>
STRETTO_INLINE void add_rows_wide(const T* x, int64_t stride, int64_t rows, int64_t width, double* sums) {
    constexpr int L = lanes<T>;
    for (int64_t c = 0; c < width; c += L) {
        const int n = width - c < L ? static_cast<int>(width - c) : L;
        Vec<T> sum[8] = {};
        int64_t r = 0;
        for (; r + 8 <= rows; r += 8)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sum[i] += load_lanes(x + (r + i) * stride + c, n);
        for (; r < rows; ++r) sum[r % 8] += load_lanes(x + r * stride + c, n);
        T part[L];
        store(part, ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
        add_wide(part, n, sums + c);
    }
}

}  // namespace stretto::STRETTO_ISA

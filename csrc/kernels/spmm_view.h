// What an aggregation is given: arrays, options, and the factor of every edge.
#pragma once
#include "abi.h"
#include "kernels/simd.h"

namespace stretto::STRETTO_ISA {

// The column of an edge where none are listed: the edge's own number. (Messages that lie in row order.)
struct InOrder {};

template <class Index>
STRETTO_INLINE int64_t column_of(const Index* col, int64_t e) {
    if constexpr (std::is_same_v<Index, InOrder>)
        return e;
    else
        return static_cast<int64_t>(col[e]);
}

// x, y, out and ties point at the first column of the register tile.
template <class T>
struct SpmmView {
    using A = Acc<T>;
    const int64_t* rowptr;
    const T* x;
    int64_t ldx;
    const A* weight;
    int64_t weight_stride;
    const A* col_scale;
    const A* row_scale;
    const T* y;
    int64_t ldy;
    A beta;
    T* out;
    int64_t ldo;
    A* ties;
    int64_t prefetch;
    A sign;
    bool one_chain;  // the untiled row has more vectors than are ever unrolled: a narrower tile must add in that order
};

// What each of the edges [begin, end) multiplies its row by. Done for many edges at once, of many rows if they are
// short: their reads, at random places for a scale per column, then overlap. Never inlined: the loop over rows that
// calls it once in 512 edges would spill its registers for it at every row.
constexpr int factors_at_once = 512;  // a multiple of every number of edges in flight

template <class T, class Index>
__attribute__((noinline)) void edge_factors(const SpmmView<T>& v, const stretto_csr& g, int64_t begin, int64_t end,
                                            Acc<T>* factor) {
    using A = Acc<T>;
    const int64_t n = end - begin, stride = v.weight_stride;
    const A *weight = v.weight, *scale = v.col_scale;
    const auto* col = static_cast<const Index*>(g.col);
    const auto take = [&](const auto* edge_id) {
        for (int64_t i = 0; i < n; ++i) factor[i] = weight[static_cast<int64_t>(edge_id[begin + i]) * stride];
    };
    if (!weight && !scale)
        for (int64_t i = 0; i < n; ++i) factor[i] = 1;
    else if (!weight)
        for (int64_t i = 0; i < n; ++i) factor[i] = scale[column_of(col, begin + i)];
    else if (!g.edge_id)
        for (int64_t i = 0; i < n; ++i) factor[i] = weight[(begin + i) * stride];
    else if (g.index_bytes == 4)
        take(static_cast<const int32_t*>(g.edge_id));
    else
        take(static_cast<const int64_t*>(g.edge_id));
    if (weight && scale)
        for (int64_t i = 0; i < n; ++i) factor[i] *= scale[column_of(col, begin + i)];
    if (v.sign < 0)
        for (int64_t i = 0; i < n; ++i) factor[i] = -factor[i];
}

// Factors of the edges [first, end). Small enough for registers: they are looked at in every row.
template <class A>
struct Factors {
    const A* values;
    int64_t first, end;
};

// Before any are made: none, or all of them where the weights are what is wanted.
template <class T>
Factors<Acc<T>> given_factors(const SpmmView<T>& v, const stretto_csr& g) {
    const bool as_given = v.weight && !g.edge_id && v.weight_stride == 1 && !v.col_scale && v.sign > 0;
    return {v.weight, 0, as_given ? INT64_MAX : 0};
}

}  // namespace stretto::STRETTO_ISA

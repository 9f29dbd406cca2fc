// Products of a tall matrix with a small one, and of two tall ones over their rows, in register tiles: some rows by
// some vectors of columns. Libraries are made for square ones, and not for every processor.
//
// Sums over all rows are made per task, and tasks are as many as the rows say, so that threads change no bit.
#pragma once
#include "core/denormals.h"
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"
#include "kernels/wide.h"

namespace stretto::STRETTO_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int tile_vectors = 3, tile_sums = 24;  // of 32 registers
#else
constexpr int tile_vectors = 2, tile_sums = 8;  // of 16
#endif

constexpr int64_t product_block = 64;  // rows of a tall matrix that are taken together

// sums[r][v] = sum over k of a[r, k] * b[k, v]. a is read by element at these strides, b by rows of vectors. fetch(i)
// is called at every step: what is read next may be fetched meanwhile. Of many k each block is summed by itself.
template <class T, int R, int NV, class Fetch, class Use>
STRETTO_INLINE void product_tile(const T* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t ldb, int64_t k,
                                 int tail, Fetch&& fetch, Use&& use) {
    constexpr int L = lanes<T>;
    Vec<T> sums[R][NV];
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sums[r][v] = Vec<T>{};
    const int64_t blocks = (k + summed_at_once - 1) / summed_at_once, size = blocks > 1 ? (k + blocks - 1) / blocks : k;
    Vec<T> before[R][NV];
    for (int64_t first = 0, last; first < k; first = last) {
        last = first + size < k ? first + size : k;
        if (first) {
#pragma GCC unroll 24
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) {  // unrolled, or the sums would leave their registers
                    before[r][v] = first > size ? before[r][v] + sums[r][v] : sums[r][v];
                    sums[r][v] = Vec<T>{};
                }
        }
        for (int64_t i = first; i < last; ++i) {
            fetch(i);
            Vec<T> row[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v)
                row[v] = v == NV - 1 ? load_lanes(b + i * ldb + v * L, tail) : load(b + i * ldb + v * L);
#pragma GCC unroll 24
            for (int r = 0; r < R; ++r) {
                const Vec<T> factor = broadcast<T>(a[r * row_stride + i * k_stride]);
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) sums[r][v] = fused(sums[r][v], factor, row[v]);
            }
        }
    }
    if (blocks > 1) {
#pragma GCC unroll 24
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sums[r][v] += before[r][v];
    }
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) use(r, v, v == NV - 1 ? tail : L, sums[r][v]);
}

// Calls tiles(first column, its vectors, lanes of the last one) for all columns.
template <class T, class Tiles>
STRETTO_INLINE void for_each_column_tile(int64_t columns, Tiles&& tiles) {
    constexpr int L = lanes<T>;
    for (int64_t c = 0; c < columns;) {
        const int64_t left = (columns - c + L - 1) / L;
        const int vectors = static_cast<int>(left < tile_vectors ? left : tile_vectors);
        const int64_t end = c + vectors * L < columns ? c + vectors * L : columns;
        const int tail = static_cast<int>(end - c - (vectors - 1) * L);
        if (vectors == 1) tiles(c, std::integral_constant<int, 1>{}, tail);
        if (vectors == 2) tiles(c, std::integral_constant<int, 2>{}, tail);
        if constexpr (tile_vectors > 2)
            if (vectors == 3) tiles(c, std::integral_constant<int, 3>{}, tail);
        c = end;
    }
}

// Calls tile(first row, its rows) for all rows, Most at a time while there are so many.
template <int Most, class Tile>
STRETTO_INLINE void for_each_row_tile(int64_t rows, Tile&& tile) {
    int64_t r = 0;
    for (; r + Most <= rows; r += Most) tile(r, std::integral_constant<int, Most>{});
    if constexpr (Most > 4)
        for (; r + 4 <= rows; r += 4) tile(r, std::integral_constant<int, 4>{});
    for (; r + 2 <= rows; r += 2) tile(r, std::integral_constant<int, 2>{});
    for (; r < rows; ++r) tile(r, std::integral_constant<int, 1>{});
}

// Fetches R rows that lie side by side, a little at every step, and as many of the next block into the second cache. (A
// lambda that only fetches is dropped by GCC.)
template <class T, int R>
struct NextRows {
    const T *rows, *far;
    STRETTO_INLINE void operator()(int64_t i) const {
        __builtin_prefetch(rows + i * R);
        __builtin_prefetch(far + i * R, 0, 2);
    }
};

// The whole product of a [rows, k], whose rows are gapless in themselves, and b [k, columns]; use(row, column, lanes,
// sums) gets it vector by vector. The next rows of a are fetched meanwhile, and those a block below.
template <class T, class Use>
STRETTO_INLINE void product_of(const T* a, int64_t row_stride, int64_t rows, const T* b, int64_t ldb, int64_t columns,
                               int64_t k, Use&& use) {
    constexpr int L = lanes<T>;
    for_each_column_tile<T>(columns, [&](int64_t c, auto vectors, int tail) {
        constexpr int NV = decltype(vectors)::value;
        // More rows than these, of fewer vectors, were slower: each is a place of its own in memory.
        for_each_row_tile<tile_sums / tile_vectors>(rows, [&](int64_t r, auto count) {
            constexpr int R = decltype(count)::value;
            const auto done = [&](int tr, int v, int n, Vec<T> sums) { use(r + tr, c + v * L, n, sums); };
            const T* from = a + r * row_stride;
            if (c == 0 && row_stride == k)
                product_tile<T, R, NV>(from, row_stride, 1, b + c, ldb, k, tail,
                                       NextRows<T, R>{from + R * k, from + product_block * k}, done);
            else
                product_tile<T, R, NV>(from, row_stride, 1, b + c, ldb, k, tail, [](int64_t) {}, done);
        });
    });
}

// Two stretches of memory that are read after the present block.
struct Ahead {
    const char *at, *end, *then, *then_end;
    template <class T>
    Ahead(const T* from, const T* to, const T* next, const T* next_end)
        : at(reinterpret_cast<const char*>(from)),
          end(reinterpret_cast<const char*>(to)),
          then(reinterpret_cast<const char*>(next)),
          then_end(reinterpret_cast<const char*>(next_end)) {}
    STRETTO_INLINE void fetch_a_line() {
        __builtin_prefetch(at, 0, 2);
        at += 64;
        if (at < end) return;
        at = then, end = then_end;
        then = then_end;
    }
};

// into [rows, columns] += a' b, summed over the k rows of both: a [k, rows] with rows a_stride apart, b [k, columns].
template <class T>
STRETTO_INLINE void add_summed_product(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t ldb,
                                       int64_t columns, int64_t k, Ahead ahead, T* into) {
    constexpr int L = lanes<T>;
    for_each_column_tile<T>(columns, [&](int64_t c, auto vectors, int tail) {
        constexpr int NV = decltype(vectors)::value;
        for_each_row_tile<tile_sums / NV>(rows, [&](int64_t r, auto count) {
            product_tile<T, decltype(count)::value, NV>(
                a + r, 1, a_stride, b + c, ldb, k, tail, [&](int64_t) { ahead.fetch_a_line(); },
                [&](int tr, int v, int n, Vec<T> sums) {
                    T* to = into + (r + tr) * columns + c + v * L;
                    store_lanes(to, load_lanes(to, n) + sums, n);
                });
        });
    });
}

// Elements from one row of a copy to the next.
constexpr int64_t spread_row(int64_t columns) { return (columns + 15) / 16 * 16 + 16; }

// Whether every value of a row is zero. Rows of sums over no neighbours are, and of the gradient of what nobody uses.
template <class T>
STRETTO_INLINE bool all_zero(const T* row, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (row[i] != T{0}) return false;
    return true;
}

// Whether a product with zero is zero: of infinities and NaN it is not.
template <class T>
STRETTO_INLINE bool all_finite(const T* row, int64_t n) {
    T sum{0};
    for (int64_t i = 0; i < n; ++i) sum += row[i] * T{0};
    return sum == T{0};
}

// Places of the rows of a block that are not all zero, unless so few are zero that leaving them out saves nothing.
struct Rows {
    static constexpr int64_t most = 128;
    int64_t count = 0;
    uint8_t place[most];

    template <class Dead>
    Rows(int64_t rows, Dead&& dead) {
        for (int64_t r = 0; r < rows; ++r)
            if (!dead(r)) place[count++] = static_cast<uint8_t>(r);
        if ((rows - count) * 8 >= rows) return;
        for (count = 0; count < rows; ++count) place[count] = static_cast<uint8_t>(count);
    }
};

// A copy of b [k, columns], read at these strides, whose rows do not all fall on the same few lines of the first cache,
// as they do where they are a power of two apart.
template <class T>
struct Spread {
    int64_t ld;
    T* rows;
    bool finite = true;
    Spread(const T* b, int64_t k, int64_t columns) : Spread(b, k, columns, columns, 1) {}
    Spread(const T* b, int64_t k, int64_t columns, int64_t row_stride, int64_t column_stride)
        : ld(spread_row(columns)),
          rows(static_cast<T*>(__builtin_malloc(static_cast<size_t>(k * ld + 1) * sizeof(T)))) {
        if (!rows) return;
        for (int64_t r = 0; r < k; ++r) {
            for (int64_t c = 0; c < columns; ++c) rows[r * ld + c] = b[r * row_stride + c * column_stride];
            finite &= all_finite(rows + r * ld, columns);
        }
    }
    ~Spread() { __builtin_free(rows); }
    Spread(const Spread&) = delete;
    Spread& operator=(const Spread&) = delete;
};

}  // namespace stretto::STRETTO_ISA

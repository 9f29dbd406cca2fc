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

// One of the products that are added up for some rows: x [rows, in] times w [in, out_width].
template <class T>
struct Term {
    const T* x;
    int64_t x_stride, in;
    const Spread<T>& w;
};

// out += factor * x w for some rows, at most 64 of them, or with `first` out = x w + bias. copy: room for those of x.
template <class T>
STRETTO_INLINE void add_term(const ProductArgs& a, const Term<T>& term, bool first, int64_t rows, T* copy, T* out) {
    const int64_t width = a.out_width, in = term.in;
    const auto* bias = static_cast<const T*>(a.bias);
    const T factor = static_cast<T>(a.factor);
    const Rows live(rows, [&](int64_t r) { return term.w.finite && all_zero(term.x + r * term.x_stride, in); });
    const auto use = [&](int64_t r, int64_t c, int n, Vec<T> value) {
        T* place = out + live.place[r] * width + c;
        if (!first) value = fused(load_lanes(place, n), broadcast<T>(factor), value);
        if (first && bias) value += load_lanes(bias + c, n);
        store_lanes(place, value, n);
    };
    const bool whole = live.count == rows;
    for (int64_t r = 0; r < live.count && !whole; ++r)
        __builtin_memcpy(copy + r * in, term.x + live.place[r] * term.x_stride, static_cast<size_t>(in) * sizeof(T));
    product_of(whole ? term.x : copy, whole ? term.x_stride : in, live.count, term.w.rows, term.w.ld, width, in, use);
    if (!first || whole) return;
    for (int64_t r = 0, next = 0; r < rows; ++r) {
        if (next < live.count && live.place[next] == r) {
            ++next;
            continue;
        }
        for (int64_t c = 0; c < width; ++c) out[r * width + c] = bias ? bias[c] : T{0};
    }
}

// out = x w + bias, or with `add` factor * x w + what out holds; and y v on top of it while it is in the cache.
template <class T>
int run_tall_product(const ProductArgs& a) {
    constexpr int64_t block = product_block, blocks_a_task = 16;
    const Spread<T> w(static_cast<const T*>(a.w), a.in, a.out_width, a.w_row_stride, a.w_column_stride);
    const Spread<T> v(static_cast<const T*>(a.v), a.y_in, a.out_width, a.v_row_stride, a.v_column_stride);
    if (!w.rows || !v.rows) return -2;
    auto* out = static_cast<T*>(a.out);
    const int64_t per_task = block * blocks_a_task, widest = a.in > a.y_in ? a.in : a.y_in;
    bool short_of_memory = false;
    parallel_for((a.rows + per_task - 1) / per_task, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        auto* copy = static_cast<T*>(__builtin_malloc(static_cast<size_t>(block * widest) * sizeof(T)));
        if (!copy) short_of_memory = true;
        const int64_t last = (task + 1) * per_task < a.rows ? (task + 1) * per_task : a.rows;
        for (int64_t first = copy ? task * per_task : last; first < last; first += block) {
            const int64_t rows = last - first < block ? last - first : block;
            T* to = out + first * a.out_width;
            const Term<T> one{static_cast<const T*>(a.x) + first * a.x_stride, a.x_stride, a.in, w};
            add_term(a, one, !a.add, rows, copy, to);
            if (!a.y) continue;
            const Term<T> other{static_cast<const T*>(a.y) + first * a.y_stride, a.y_stride, a.y_in, v};
            add_term(a, other, false, rows, copy, to);
        }
        __builtin_free(copy);
    });
    return short_of_memory ? -2 : 0;
}

// x' w over all rows of both, x [rows, out_width], w [rows, in]: for each task the part [out_width, in] of its rows;
// where `sums` is given, it gets those of x [tasks, out_width] too, in fp64.
template <class T>
int run_sum_product(const ProductArgs& a) {
    constexpr int64_t block = 128;
    const auto* x = static_cast<const T*>(a.x);
    const auto* w = static_cast<const T*>(a.w);
    const int64_t per_task = (a.rows + a.tasks - 1) / a.tasks, ld = spread_row(a.in), share = a.out_width * a.in;
    bool short_of_memory = false;
    parallel_for(a.tasks, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        T* part = static_cast<T*>(a.out) + task * share;
        __builtin_memset(part, 0, static_cast<size_t>(share) * sizeof(T));
        double* sums = a.sums ? static_cast<double*>(a.sums) + task * a.out_width : nullptr;
        if (sums) __builtin_memset(sums, 0, static_cast<size_t>(a.out_width) * sizeof(double));
        auto* copy = static_cast<T*>(__builtin_malloc(static_cast<size_t>(block * (ld + a.out_width)) * sizeof(T)));
        T* copy_x = copy + block * ld;
        if (!copy) short_of_memory = true;
        const int64_t end = (task + 1) * per_task < a.rows ? (task + 1) * per_task : a.rows;
        for (int64_t first = copy ? task * per_task : end; first < end; first += block) {
            const int64_t rows = end - first < block ? end - first : block;
            const int64_t after = end - first - rows < block ? end - first - rows : block;
            const T* left = x + first * a.x_stride;
            const T* right = w + first * a.w_row_stride;
            if (sums) add_rows_wide(left, a.x_stride, rows, a.out_width, sums);
            const Rows live(rows, [&](int64_t r) {
                const T* one = left + r * a.x_stride;
                const T* other = right + r * a.w_row_stride;
                return (all_zero(one, a.out_width) && all_finite(other, a.in)) ||
                       (all_zero(other, a.in) && all_finite(one, a.out_width));
            });
            const bool whole = live.count == rows;
            for (int64_t r = 0; r < live.count && !whole; ++r) {
                __builtin_memcpy(copy + r * ld, right + live.place[r] * a.w_row_stride,
                                 static_cast<size_t>(a.in) * sizeof(T));
                __builtin_memcpy(copy_x + r * a.out_width, left + live.place[r] * a.x_stride,
                                 static_cast<size_t>(a.out_width) * sizeof(T));
            }
            const T *next_left = left + rows * a.x_stride, *next_right = right + rows * a.w_row_stride;
            const Ahead ahead(next_left, next_left + after * a.x_stride, next_right,
                              next_right + after * a.w_row_stride);
            // Whole, both stay where they are: that rows fall on few lines of the first cache costs less than a copy.
            add_summed_product(whole ? left : copy_x, whole ? a.x_stride : a.out_width, a.out_width,
                               whole ? right : copy, whole ? a.w_row_stride : ld, a.in, live.count, ahead, part);
        }
        __builtin_free(copy);
    });
    return short_of_memory ? -2 : 0;
}

}  // namespace stretto::STRETTO_ISA

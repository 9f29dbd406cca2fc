// relu(z + b) W' + c and its gradients for narrow matrices: every row is read once, and what is made of it stays in
// the first cache until it is used up.
//
// Rows go in blocks. A product of a block is made of register tiles: some rows by some vectors of columns. Gradients of
// W and of the biases are summed per task, and tasks are as many as the rows say, so that threads change no bit.
#pragma once
#include "core/denormals.h"
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int tile_rows = 8, tile_vectors = 3;  // 24 of 32 registers hold sums
#else
constexpr int tile_rows = 4, tile_vectors = 2;  // 8 of 16
#endif
constexpr int64_t block_rows = 64;

// sums[r][v] = sum over k of a[r, k] * b[k, v]. a is read by element at these strides, b by rows of vectors.
template <class T, int R, int NV, class Use>
STRETTO_INLINE void product_tile(const T* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t ldb, int64_t k,
                                 int tail, Use&& use) {
    constexpr int L = lanes<T>;
    Vec<T> sums[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sums[r][v] = Vec<T>{};
    for (int64_t i = 0; i < k; ++i) {
        Vec<T> row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
            row[v] = v == NV - 1 ? load_lanes(b + i * ldb + v * L, tail) : load(b + i * ldb + v * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const T factor = a[r * row_stride + i * k_stride];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sums[r][v] += factor * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) use(r, v, v == NV - 1 ? tail : L, sums[r][v]);
}

// The whole product of a [rows, k] and b [k, columns]; use(row, column, lanes, sums) gets it vector by vector.
template <class T, class Use>
STRETTO_INLINE void product_of(const T* a, int64_t row_stride, int64_t k_stride, int64_t rows, const T* b, int64_t ldb,
                               int64_t columns, int64_t k, Use&& use) {
    constexpr int L = lanes<T>;
    const auto rows_of = [&](int64_t c, auto vectors, int tail) {
        constexpr int NV = decltype(vectors)::value;
        const auto some = [&](int64_t r, auto count) {
            product_tile<T, decltype(count)::value, NV>(
                a + r * row_stride, row_stride, k_stride, b + c, ldb, k, tail,
                [&](int tr, int v, int n, Vec<T> sums) { use(r + tr, c + v * L, n, sums); });
        };
        int64_t r = 0;
        for (; r + tile_rows <= rows; r += tile_rows) some(r, std::integral_constant<int, tile_rows>{});
        for (; r + 2 <= rows; r += 2) some(r, std::integral_constant<int, 2>{});
        for (; r < rows; ++r) some(r, std::integral_constant<int, 1>{});
    };
    for (int64_t c = 0; c < columns;) {
        const int64_t left = (columns - c + L - 1) / L;
        const int vectors = static_cast<int>(left < tile_vectors ? left : tile_vectors);
        const int64_t end = c + vectors * L < columns ? c + vectors * L : columns;
        const int tail = static_cast<int>(end - c - (vectors - 1) * L);
        if (vectors == 1) rows_of(c, std::integral_constant<int, 1>{}, tail);
        if (vectors == 2) rows_of(c, std::integral_constant<int, 2>{}, tail);
        if constexpr (tile_vectors > 2)
            if (vectors == 3) rows_of(c, std::integral_constant<int, 3>{}, tail);
        c = end;
    }
}

// relu(z + b) of some rows. NaN stays NaN.
template <class T>
STRETTO_INLINE void activate(const T* z, const T* bias, int64_t rows, int64_t width, T* out) {
    constexpr int L = lanes<T>;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < width; c += L) {
            const int n = static_cast<int>(width - c < L ? width - c : L);
            Vec<T> value = load_lanes(z + r * width + c, n);
            if (bias) value += load_lanes(bias + c, n);
            store_lanes(out + r * width + c, value <= Vec<T>{} ? Vec<T>{} : value, n);
        }
}

// A copy of b [k, columns] whose rows do not all fall on the same few lines of the first cache, as they do where they
// are a power of two apart.
template <class T>
struct Spread {
    int64_t ld;
    T* rows;
    Spread(const T* b, int64_t k, int64_t columns)
        : ld((columns + 15) / 16 * 16 + 16),
          rows(static_cast<T*>(__builtin_malloc(static_cast<size_t>(k * ld) * sizeof(T)))) {
        if (rows)
            for (int64_t r = 0; r < k; ++r)
                __builtin_memcpy(rows + r * ld, b + r * columns, static_cast<size_t>(columns) * sizeof(T));
    }
    ~Spread() { __builtin_free(rows); }
    Spread(const Spread&) = delete;
    Spread& operator=(const Spread&) = delete;
};

template <class T>
int run_relu_dense(const ReluDenseArgs& a) {
    const auto* z = static_cast<const T*>(a.z);
    const auto* z_bias = static_cast<const T*>(a.z_bias);
    const Spread<T> weight(static_cast<const T*>(a.weight), a.in, a.out_width);
    if (!weight.rows) return -2;
    const auto* bias = static_cast<const T*>(a.bias);
    auto* out = static_cast<T*>(a.out);
    const int64_t blocks = (a.rows + block_rows - 1) / block_rows;
    parallel_for((blocks + 15) / 16, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        alignas(64) T active[block_rows * relu_dense_most];
        const int64_t last = task * 16 + 16 < blocks ? task * 16 + 16 : blocks;
        for (int64_t block = task * 16; block < last; ++block) {
            const int64_t first = block * block_rows;
            const int64_t rows = a.rows - first < block_rows ? a.rows - first : block_rows;
            activate(z + first * a.in, z_bias, rows, a.in, active);
            T* to = out + first * a.out_width;
            product_of(active, a.in, 1, rows, weight.rows, weight.ld, a.out_width, a.in,
                       [&](int64_t r, int64_t c, int n, Vec<T> value) {
                           if (bias) value += load_lanes(bias + c, n);
                           store_lanes(to + r * a.out_width + c, value, n);
                       });
        }
    });
    return 0;
}

// dz, and for each task its share of dW, dbias and dz_bias, laid out one after the other in `shares`.
template <class T>
int run_relu_dense_grad(const ReluDenseArgs& a) {
    const auto* z = static_cast<const T*>(a.z);
    const auto* z_bias = static_cast<const T*>(a.z_bias);
    const Spread<T> weight(static_cast<const T*>(a.weight), a.out_width, a.in);
    if (!weight.rows) return -2;
    const auto* grad = static_cast<const T*>(a.grad);
    auto* dz = static_cast<T*>(a.dz);
    const int64_t in = a.in, width = a.out_width, share = width * in + width + in;
    const int64_t per_task = (a.rows + a.tasks - 1) / a.tasks;
    parallel_for(a.tasks, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        alignas(64) T active[block_rows * relu_dense_most];
        T* dweight = static_cast<T*>(a.shares) + task * share;
        T *dbias = dweight + width * in, *dz_bias = dbias + width;
        __builtin_memset(dweight, 0, static_cast<size_t>(share) * sizeof(T));
        const int64_t end = (task + 1) * per_task < a.rows ? (task + 1) * per_task : a.rows;
        for (int64_t first = task * per_task; first < end; first += block_rows) {
            const int64_t rows = end - first < block_rows ? end - first : block_rows;
            const T* g = grad + first * width;
            activate(z + first * in, z_bias, rows, in, active);
            product_of(g, 1, width, width, active, in, in, rows, [&](int64_t r, int64_t c, int n, Vec<T> value) {
                T* to = dweight + r * in + c;
                store_lanes(to, load_lanes(to, n) + value, n);
            });
            for (int64_t c = 0; c < width; c += lanes<T>) {
                const int n = static_cast<int>(width - c < lanes<T> ? width - c : lanes<T>);
                Vec<T> sum = load_lanes(dbias + c, n);
                for (int64_t r = 0; r < rows; ++r) sum += load_lanes(g + r * width + c, n);
                store_lanes(dbias + c, sum, n);
            }
            if (!dz) continue;
            product_of(g, width, 1, rows, weight.rows, weight.ld, in, width,
                       [&](int64_t r, int64_t c, int n, Vec<T> value) {
                           value = load_lanes(active + r * in + c, n) <= Vec<T>{} ? Vec<T>{} : value;
                           store_lanes(dz + (first + r) * in + c, value, n);
                           store_lanes(dz_bias + c, load_lanes(dz_bias + c, n) + value, n);
                       });
        }
    });
    return 0;
}

}  // namespace stretto::STRETTO_ISA

// relu(z + b) W' + c and its gradients for narrow matrices: every row is read once, and what is made of it stays in
// the first cache until it is used up.
//
// Gradients of W and of the biases are summed per task, and tasks are as many as the rows say, so that threads change
// no bit.
#pragma once
#include "kernels/product.h"

namespace stretto::STRETTO_ISA {

constexpr int64_t block_rows = 64;

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
            product_of(active, a.in, rows, weight.rows, weight.ld, a.out_width, a.in,
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
        double bias_sums[relu_dense_most] = {}, z_bias_sums[relu_dense_most] = {};
        const int64_t end = (task + 1) * per_task < a.rows ? (task + 1) * per_task : a.rows;
        for (int64_t first = task * per_task; first < end; first += block_rows) {
            const int64_t rows = end - first < block_rows ? end - first : block_rows;
            const T* g = grad + first * width;
            activate(z + first * in, z_bias, rows, in, active);
            const int64_t next = first + rows, stop = next + block_rows < end ? next + block_rows : end;
            const Ahead ahead(grad + next * width, grad + stop * width, z + next * in, z + stop * in);
            add_summed_product(g, width, width, active, in, in, rows, ahead, dweight);
            add_rows_wide(g, width, rows, width, bias_sums);
            if (!dz) continue;
            product_of(g, width, rows, weight.rows, weight.ld, in, width,
                       [&](int64_t r, int64_t c, int n, Vec<T> value) {
                           value = load_lanes(active + r * in + c, n) <= Vec<T>{} ? Vec<T>{} : value;
                           store_lanes(dz + (first + r) * in + c, value, n);
                       });
            if (z_bias) add_rows_wide(dz + first * in, in, rows, in, z_bias_sums);
        }
        narrow_sums(bias_sums, width, dbias);
        narrow_sums(z_bias_sums, in, dz_bias);
    });
    return 0;
}

}  // namespace stretto::STRETTO_ISA

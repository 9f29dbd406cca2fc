// Products of a tall matrix with a small one, and of two tall ones over their rows; and relu(z + b) W' + c with its
// gradients for narrow matrices: every row is read once, and what is made of it stays in the first cache until it is
// used up.
//
// Gradients of W and of the biases are summed per task, and tasks are as many as the rows say, so that threads change
// no bit.
#include "core/error.h"
#include "kernels/product.h"

namespace stretto::STRETTO_ISA {

constexpr int64_t widest = 256;  // values of z in a row

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
int relu_dense(const relu_dense_args& a) {
    if (a.in > widest) return error("relu_dense: in is %lld, at most %lld", (long long)a.in, (long long)widest);
    const auto* z = static_cast<const T*>(a.z);
    const auto* z_bias = static_cast<const T*>(a.z_bias);
    const Spread<T> weight(static_cast<const T*>(a.weight), a.in, a.out_width);
    if (!weight.rows) return -2;
    const auto* bias = static_cast<const T*>(a.bias);
    auto* out = static_cast<T*>(a.out);
    const int64_t blocks = (a.rows + product_block - 1) / product_block;
    parallel_for((blocks + 15) / 16, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        alignas(64) T active[product_block * widest];
        const int64_t last = task * 16 + 16 < blocks ? task * 16 + 16 : blocks;
        for (int64_t block = task * 16; block < last; ++block) {
            const int64_t first = block * product_block;
            const int64_t rows = a.rows - first < product_block ? a.rows - first : product_block;
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
int relu_dense_grad(const relu_dense_grad_args& a) {
    if (a.in > widest) return error("relu_dense_grad: in is %lld, at most %lld", (long long)a.in, (long long)widest);
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
        alignas(64) T active[product_block * widest];
        T* dweight = static_cast<T*>(a.shares) + task * share;
        T *dbias = dweight + width * in, *dz_bias = dbias + width;
        __builtin_memset(dweight, 0, static_cast<size_t>(share) * sizeof(T));
        double bias_sums[widest] = {}, z_bias_sums[widest] = {};
        const int64_t end = (task + 1) * per_task < a.rows ? (task + 1) * per_task : a.rows;
        for (int64_t first = task * per_task; first < end; first += product_block) {
            const int64_t rows = end - first < product_block ? end - first : product_block;
            const T* g = grad + first * width;
            activate(z + first * in, z_bias, rows, in, active);
            const int64_t next = first + rows, stop = next + product_block < end ? next + product_block : end;
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

FOR_WIDE(relu_dense)
FOR_WIDE(relu_dense_grad)

// One of the products that are added up for some rows: x [rows, in] times w [in, out_width].
template <class T>
struct Term {
    const T* x;
    int64_t x_stride, in;
    const Spread<T>& w;
};

// out += factor * x w for some rows, at most 64 of them, or with `first` out = x w + bias. copy: room for those of x.
template <class T>
STRETTO_INLINE void add_term(const tall_product_args& a, const Term<T>& term, bool first, int64_t rows, T* copy,
                             T* out) {
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
int tall_product(const tall_product_args& a) {
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
int sum_product(const sum_product_args& a) {
    if (a.tasks < 1) return error("sum_product: tasks is %lld, wanted at least 1", (long long)a.tasks);
    constexpr int64_t block = 128;
    const auto* x = static_cast<const T*>(a.x);
    const auto* w = static_cast<const T*>(a.w);
    const int64_t per_task = (a.rows + a.tasks - 1) / a.tasks, ld = spread_row(a.in), share = a.out_width * a.in;
    bool short_of_memory = false;
    parallel_for(a.tasks, a.threads, [&](int64_t task) {
        const DenormalsAreZero mode;
        T* part = static_cast<T*>(a.parts) + task * share;
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
            const T* right = w + first * a.w_stride;
            if (sums) add_rows_wide(left, a.x_stride, rows, a.out_width, sums);
            const Rows live(rows, [&](int64_t r) {
                const T* one = left + r * a.x_stride;
                const T* other = right + r * a.w_stride;
                return (all_zero(one, a.out_width) && all_finite(other, a.in)) ||
                       (all_zero(other, a.in) && all_finite(one, a.out_width));
            });
            const bool whole = live.count == rows;
            for (int64_t r = 0; r < live.count && !whole; ++r) {
                __builtin_memcpy(copy + r * ld, right + live.place[r] * a.w_stride,
                                 static_cast<size_t>(a.in) * sizeof(T));
                __builtin_memcpy(copy_x + r * a.out_width, left + live.place[r] * a.x_stride,
                                 static_cast<size_t>(a.out_width) * sizeof(T));
            }
            const T *next_left = left + rows * a.x_stride, *next_right = right + rows * a.w_stride;
            const Ahead ahead(next_left, next_left + after * a.x_stride, next_right, next_right + after * a.w_stride);
            // Whole, both stay where they are: that rows fall on few lines of the first cache costs less than a copy.
            add_summed_product(whole ? left : copy_x, whole ? a.x_stride : a.out_width, a.out_width,
                               whole ? right : copy, whole ? a.w_stride : ld, a.in, live.count, ahead, part);
        }
        __builtin_free(copy);
    });
    return short_of_memory ? -2 : 0;
}

FOR_WIDE(tall_product)
FOR_WIDE(sum_product)
}  // namespace stretto::STRETTO_ISA

// Linears and activations one after the other over the rows of a small matrix, forward and backward: a block of rows
// goes through all of them while it is in the first cache, and threads meet once for the whole chain.
//
// What backward needs is stored on the way, where the caller says. Gradients of weights are summed per task, and tasks
// are as many as the caller says, so that threads change no bit.
#include "core/error.h"
#include "kernels/activations.h"
#include "kernels/product.h"

namespace stretto::STRETTO_ISA {

constexpr int64_t widest = 256;  // values in a row

template <class T, class Args>
struct ChainOf {
    static constexpr int L = lanes<T>;
    const Args& a;

    STRETTO_INLINE int64_t width_before(int64_t s) const { return s ? a.stages[s - 1].width : a.in; }
    static STRETTO_INLINE int lanes_at(int64_t c, int64_t width) {
        return static_cast<int>(width - c < L ? width - c : L);
    }
    static STRETTO_INLINE Vec<T> positive(Vec<T> value) {  // NaN stays NaN
        return value <= Vec<T>{} ? Vec<T>{} : value;
    }

    // Raises an error where the chain is none.
    int check(const char* name) const {
        int64_t most = a.in;
        for (int64_t s = 0; s < a.count; ++s) most = a.stages[s].width > most ? a.stages[s].width : most;
        if (most > widest)
            return error("%s: a row has %lld values, at most %lld", name, (long long)most, (long long)widest);
        return a.count < 1 || a.n < 1 ? error("%s: wanted at least one stage and one row", name) : 0;
    }

    // Every [width, in] weight as [in, width], one after the other.
    void turn_weights(T* turned) const {
        for (int64_t s = 0; s < a.count; ++s) {
            const stretto_stage& stage = a.stages[s];
            if (stage.kind != STRETTO_STAGE_DENSE) continue;
            const int64_t in = width_before(s), width = stage.width;
            const T* weight = static_cast<const T*>(stage.weight);
            for (int64_t r0 = 0; r0 < width; r0 += 16)
                for (int64_t k = 0; k < in; ++k)
                    for (int64_t r = r0; r < r0 + 16 && r < width; ++r) turned[k * width + r] = weight[r * in + k];
            turned += in * width;
        }
    }

    // Whether a Linear's result meets a ReLU in the place where it is stored.
    STRETTO_INLINE bool meets_relu(int64_t s) const {
        return s + 1 < a.count && a.stages[s + 1].kind == STRETTO_STAGE_RELU && a.stages[s + 1].out == a.stages[s].out;
    }

    void forward_block(int64_t first, int64_t rows, const T* turned) const {
        const T* from = static_cast<const T*>(a.rows) + first * a.in;
        for (int64_t s = 0; s < a.count; ++s) {
            const stretto_stage& stage = a.stages[s];
            const int64_t in = width_before(s), width = stage.width;
            T* to = static_cast<T*>(stage.out) + first * width;
            if (stage.kind == STRETTO_STAGE_DENSE) {
                const T* bias = static_cast<const T*>(stage.bias);
                const bool relu = meets_relu(s);
                product_of(from, in, rows, turned, width, width, in, [&](int64_t r, int64_t c, int n, Vec<T> value) {
                    if (bias) value += load_lanes(bias + c, n);
                    store_lanes(to + r * width + c, relu ? positive(value) : value, n);
                });
                turned += in * width;
                if (relu) ++s;
            } else {
                each(stage, first, rows, width, from, nullptr, to);
            }
            from = to;
        }
    }

    // An activation of `from`; or with kept, what backward finds of it, its gradient for `from`.
    void each(const stretto_stage& stage, int64_t first, int64_t rows, int64_t width, const T* from, const T* kept,
              T* to) const {
        const T* factors = static_cast<const T*>(stage.weight);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < width; c += L) {
                const int n = lanes_at(c, width);
                const int64_t at = r * width + c;
                Vec<T> value = load_lanes(from + at, n);
                if (stage.kind == STRETTO_STAGE_SCALE)
                    value *= factors[first + r];
                else if (stage.kind == STRETTO_STAGE_RELU)
                    value = kept ? (load_lanes(kept + at, n) <= Vec<T>{} ? Vec<T>{} : value) : positive(value);
                else if (kept)
                    value *= activate<T>(STRETTO_ACT_SOFTPLUS, load_lanes(kept + at, n)).slope;
                else
                    value = activate<T>(STRETTO_ACT_SOFTPLUS, value).value - static_cast<T>(stage.shift);
                store_lanes(to + at, value, n);
            }
    }

    int forward() const {
        T* turned = static_cast<T*>(a.scratch);
        turn_weights(turned);
        parallel_for((a.n + product_block - 1) / product_block, a.threads, [&](int64_t block) {
            const DenormalsAreZero mode;
            const int64_t first = block * product_block;
            forward_block(first, a.n - first < product_block ? a.n - first : product_block, turned);
        });
        return 0;
    }

    // The first stage that still has something to do in backward.
    int64_t lowest() const {
        if (a.drows) return 0;
        for (int64_t s = 0; s < a.count; ++s)
            if (a.stages[s].dweight || a.stages[s].dbias) return s;
        return a.count;
    }

    // Where the share of a stage begins, and where all end.
    int64_t place(int64_t stage) const {
        int64_t at = 0;
        for (int64_t s = 0; s < stage; ++s)
            if (a.stages[s].kind == STRETTO_STAGE_DENSE) at += a.stages[s].width * (width_before(s) + 1);
        return at;
    }

    void backward_block(int64_t first, int64_t rows, int64_t down_to, T* share, T* const* buffers,
                        double* columns) const {
        const T* g = static_cast<const T*>(a.grad) + first * a.stages[a.count - 1].width;
        int turn = 0;
        for (int64_t s = a.count - 1; s >= down_to; --s) {
            const stretto_stage& stage = a.stages[s];
            const int64_t in = width_before(s), width = stage.width;
            const T* kept = static_cast<const T*>(stage.out);
            T* to = s == 0 && a.drows ? static_cast<T*>(a.drows) + first * in : buffers[turn];
            if (stage.kind != STRETTO_STAGE_DENSE) {
                if (stage.kind == STRETTO_STAGE_SCALE) kept = nullptr;
                each(stage, first, rows, width, g, kept ? kept + first * width : nullptr, to);
            } else {
                T* dweight = share + place(s);
                if (stage.dweight) add_outer(g, width, kept + first * in, in, rows, dweight);
                if (stage.dbias) add_rows_wide(g, width, rows, width, columns + s * widest);
                if (s == down_to && !a.drows) return;
                // A ReLU below is met here: its result says where the gradient passes.
                const bool relu = s > down_to && a.stages[s - 1].kind == STRETTO_STAGE_RELU && s - 1 > 0;
                const T* gate = relu ? static_cast<const T*>(a.stages[s - 1].out) + first * in : nullptr;
                product_of(g, width, rows, static_cast<const T*>(stage.weight), in, in, width,
                           [&](int64_t r, int64_t c, int n, Vec<T> value) {
                               if (gate) value = load_lanes(gate + r * in + c, n) <= Vec<T>{} ? Vec<T>{} : value;
                               store_lanes(to + r * in + c, value, n);
                           });
                if (relu) --s;
            }
            g = to;
            turn ^= 1;
        }
    }

    // dweight [width, in] += g' x
    static void add_outer(const T* g, int64_t width, const T* x, int64_t in, int64_t rows, T* dweight) {
        add_summed_product(g, width, width, x, in, in, rows, Ahead(g, g, g, g), dweight);  // both have just been made
    }

    int backward() const {
        const int64_t down_to = lowest(), all = place(a.count);
        const int64_t blocks = (a.n + product_block - 1) / product_block, per_task = (blocks + a.tasks - 1) / a.tasks;
        T* shares = static_cast<T*>(a.scratch);
        bool short_of_memory = false;
        parallel_for(a.tasks, a.threads, [&](int64_t task) {
            const DenormalsAreZero mode;
            // The sums over rows that biases get, widest of each stage.
            const auto stages = static_cast<size_t>(a.count);
            auto* columns = static_cast<double*>(__builtin_calloc(stages * widest, sizeof(double)));
            if (!columns) short_of_memory = true;
            if (!columns) return;
            alignas(64) T first_buffer[product_block * widest], second_buffer[product_block * widest];
            T* const buffers[2] = {first_buffer, second_buffer};
            T* share = shares + task * all;
            __builtin_memset(share, 0, static_cast<size_t>(all) * sizeof(T));
            for (int64_t block = task * per_task; block < (task + 1) * per_task && block < blocks; ++block) {
                const int64_t first = block * product_block;
                backward_block(first, a.n - first < product_block ? a.n - first : product_block, down_to, share,
                               buffers, columns);
            }
            for (int64_t s = down_to; s < a.count; ++s)
                if (a.stages[s].dbias)
                    narrow_sums(columns + s * widest, a.stages[s].width,
                                share + place(s) + a.stages[s].width * width_before(s));
            __builtin_free(columns);
        });
        if (short_of_memory) return -2;
        for (int64_t s = down_to; s < a.count; ++s) {
            const stretto_stage& stage = a.stages[s];
            if (stage.kind != STRETTO_STAGE_DENSE) continue;
            const int64_t size = stage.width * width_before(s);
            if (stage.dweight) add_up(shares + place(s), all, size, static_cast<T*>(stage.dweight));
            if (stage.dbias) add_up(shares + place(s) + size, all, stage.width, static_cast<T*>(stage.dbias));
        }
        return 0;
    }

    void add_up(const T* share, int64_t step, int64_t size, T* to) const {
        for (int64_t c = 0; c < size; c += L) {
            const int n = lanes_at(c, size);
            Vec<T> sum = load_lanes(share + c, n);
            for (int64_t task = 1; task < a.tasks; ++task) sum += load_lanes(share + task * step + c, n);
            store_lanes(to + c, sum, n);
        }
    }
};

template <class T>
int chain(const chain_args& a) {
    const ChainOf<T, chain_args> whole{a};
    return whole.check("chain") ? -1 : whole.forward();
}
FOR_WIDE(chain)

template <class T>
int chain_grad(const chain_grad_args& a) {
    const ChainOf<T, chain_grad_args> whole{a};
    return whole.check("chain_grad") ? -1 : whole.backward();
}
FOR_WIDE(chain_grad)
}  // namespace stretto::STRETTO_ISA

// Attention, forward: one pass over a row's edges with online softmax. What is kept of a row is its largest score, the
// sum of its exponentials and the weighted sum of values; a cut row's pieces are merged in a fixed order.
#include "kernels/attention.h"

namespace stretto::STRETTO_ISA {

template <class T>
struct AttentionForward : Attention<T> {
    using A = Acc<T>;
    using Base = Attention<T>;
    using Base::a, Base::g, Base::H, Base::F, Base::D;
    static constexpr int B = block_edges;
    const int64_t size;  // of a row's state: largest [H], sum [H], values [H, F], attributes [H, D]

    AttentionForward(const stretto_csr& graph, const stretto_attention& args)
        : Base(graph, args), size(2 * H + H * F + H * D) {}

    void clear(A* state) const {
        for (int64_t h = 0; h < H; ++h) state[h] = a.form == STRETTO_SCORE_WEIGHT ? A(0) : A(-__builtin_inf());
        for (int64_t k = H; k < size; ++k) state[k] = 0;
    }

    // Brings head h's state to a larger maximum.
    void rescale(A* state, int64_t h, A most) const {
        const A before = state[h];
        state[h] = most;
        if (before == most || before == A(-__builtin_inf())) return;  // nothing has been summed, or nothing changes
        const A factor = exponential_of_one<A>(before - most);
        state[H + h] *= factor;
        A* values = state + 2 * H + h * F;
        for (int64_t k = 0; k < F; ++k) values[k] *= factor;
        A* attributes = state + 2 * H + H * F + h * D;
        for (int64_t k = 0; k < D; ++k) attributes[k] *= factor;
    }

    void edges(int64_t row, int64_t begin, int64_t end, int64_t ahead_end, A* state, A* score, A* inner) const {
        constexpr int L = lanes<A>;
        A* alpha = static_cast<A*>(a.alpha);
        for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
            this->scores(block, row, true, score, inner);
            if (A* kept = static_cast<A*>(a.scores)) {
                block.fetch_edges(kept, H);
                for (int b = 0; b < block.n; ++b)
                    for (int64_t h = 0; h < H; ++h) kept[block.id[b] * H + h] = score[h * B + b];
            }
            if (alpha)
                for (int b = 0; b < block.n; ++b)
                    for (int64_t h = 0; h < H; ++h) alpha[block.id[b] * H + h] = score[h * B + b];
            for (int64_t h = 0; h < H; ++h) {
                A* p = score + h * B;
                if (a.form != STRETTO_SCORE_WEIGHT) {
                    Vec<A> most = load(p);
                    for (int b = L; b < block.padded; b += L) {
                        const Vec<A> s = load(p + b);
                        most = (s > most) | (s != s) ? s : most;
                    }
                    const A largest = largest_of<A>(most, state[h]);
                    rescale(state, h, largest);
                    const A shift = largest == A(-__builtin_inf()) ? A(0) : largest;
                    Vec<A> sum{};
                    for (int b = 0; b < block.padded; b += L) {
                        const Vec<A> e = exponential_of(load(p + b) - shift);
                        store(p + b, e);
                        sum += e;
                    }
                    state[H + h] += sum_lanes<A>(sum);
                }
                if (a.dropout > 0) {
                    A factor[B];
                    this->mask(block, h, factor);
                    for (int b = 0; b < block.n; ++b) p[b] *= factor[b];
                }
                if (h == 0 && !this->reads_rows())
                    for (int b = 0; b < block.n; ++b)
                        prefetch_bytes(this->v + block.ahead[b] * a.ldv,
                                       a.value_heads * F * static_cast<int64_t>(sizeof(T)));
                add_rows(this->v + h * this->value_step, block.other, a.ldv, p, block.n, F, state + 2 * H + h * F);
                if (this->attr) add_rows(this->attr, block.id, D, p, block.n, D, state + 2 * H + H * F + h * D);
            }
        });
    }

    void finish(int64_t row, A* state) const {
        A* stats = static_cast<A*>(a.stats) + row * H * 2;
        A* out = static_cast<A*>(a.out) + row * H * F;
        A* out_attr = static_cast<A*>(a.out_attr);
        const A* bias = static_cast<const A*>(a.bias);
        const bool some = g.rowptr[row] < g.rowptr[row + 1];
        for (int64_t h = 0; h < H; ++h) {
            // A row of scores that are all -inf sums to 0 and gives NaN, as the quotient does in torch.
            const A inverse = a.form == STRETTO_SCORE_WEIGHT || !some ? A(1) : A(1) / state[H + h];
            stats[2 * h] = some ? state[h] : A(0), stats[2 * h + 1] = inverse;
            store_scaled(out + h * F, state + 2 * H + h * F, inverse, F, bias ? bias + h * F : nullptr);
            if (out_attr) store_scaled(out_attr + (row * H + h) * D, state + 2 * H + H * F + h * D, inverse, D);
        }
        if (a.alpha) weights(row);
    }

    // From the scores that `edges` left in alpha to the weights.
    void weights(int64_t row) const {
        constexpr int L = lanes<A>;
        A* alpha = static_cast<A*>(a.alpha);
        const A* stats = static_cast<const A*>(a.stats) + row * H * 2;
        for_each_block(g, g.rowptr[row], g.rowptr[row + 1], 0, [&](const EdgeBlock& block) {
            A p[B], factor[B];
            for (int64_t h = 0; h < H; ++h) {
                gather(alpha + h, block.id, H, block.n, p);
                if (a.form != STRETTO_SCORE_WEIGHT)
                    for (int b = 0; b < block.padded; b += L)
                        store(p + b, exponential_of(load(p + b) - stats[2 * h]) * stats[2 * h + 1]);
                if (a.dropout > 0 && a.alpha_dropped) {
                    this->mask(block, h, factor);
                    for (int b = 0; b < block.n; ++b) p[b] *= factor[b];
                }
                for (int b = 0; b < block.n; ++b) alpha[block.id[b] * H + h] = p[b];
            }
        });
    }

    int run(int threads) const {
        A* slots = nullptr;
        if (g.num_slots > 0) {
            slots = static_cast<A*>(__builtin_malloc(static_cast<size_t>(g.num_slots * size) * sizeof(A)));
            if (!slots) return -2;
        }
        bool failed = false;
        parallel_for(g.num_tasks, threads, [&](int64_t t) {
            const DenormalsAreZero mode(flushes<T>);
            const int64_t* task = g.tasks + 5 * t;
            Scratch scratch((size + 2 * H * B) * static_cast<int64_t>(sizeof(A)) + 512);
            if (!scratch.memory) {
                failed = true;
                return;
            }
            A *own = scratch.take<A>(size), *score = scratch.take<A>(H * B), *inner = scratch.take<A>(H * B);
            const bool piece = task[4] >= 0;
            for (int64_t row = task[0]; row < task[1]; ++row) {
                A* state = piece ? slots + task[4] * size : own;
                clear(state);
                edges(row, piece ? task[2] : g.rowptr[row], piece ? task[3] : g.rowptr[row + 1], task[3], state, score,
                      inner);
                if (!piece) finish(row, state);
            }
        });
        if (!failed)
            parallel_for(g.num_hubs, threads, [&](int64_t hub) {
                const DenormalsAreZero mode(flushes<T>);
                merge(g.hubs + 3 * hub, slots);
            });
        __builtin_free(slots);
        return failed ? -2 : 0;
    }

    void merge(const int64_t* hub, A* slots) const {
        A* state = slots + hub[1] * size;
        for (int64_t s = hub[1] + 1; s < hub[2]; ++s) {
            A* next = slots + s * size;
            for (int64_t h = 0; h < H; ++h) {
                const A largest = larger<A>(state[h], next[h]);
                rescale(state, h, largest);
                rescale(next, h, largest);
            }
            for (int64_t k = H; k < size; ++k) state[k] += next[k];
        }
        finish(hub[0], state);
    }
};

template <class T>
int attention_forward(const attention_forward_args& args) {
    return AttentionForward<T>(*args.g, *args.a).run(args.threads);
}

FOR_FLOATS(attention_forward)
}  // namespace stretto::STRETTO_ISA

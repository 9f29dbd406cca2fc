// Attention, backward: one pass over the transposed edges. Weights are computed again from the row's two statistics.
// The row sum of the softmax gradient is grad . out, known before, so that one read of a destination's gradient serves
// both d alpha and dv. What is summed by destination instead (dleft, dquery) takes a second pass over the scalars d
// score, which for SUM_ROWS and DOT reads the right rows again.
#include "kernels/attention.h"

namespace stretto::STRETTO_ISA {

// One tile of the gradient of att . leaky_relu(near + far + edge): into += t and datt += t * z over the block's edges,
// with t = d score * leaky_relu'(z); dedge <- att * t.
template <class T, int NV>
STRETTO_INLINE void leaky_tile(const T* near, const T* far, int64_t ld, const T* edge, int64_t edge_ld, T* dedge,
                               const EdgeBlock& block, const Acc<T>* dscore, Acc<T> slope, const Acc<T>* att,
                               Acc<T>* into, double* datt, int tail) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const auto lanes_of = [&](int k) { return k == NV - 1 ? tail : L; };
    Vec<A> fixed[NV], sum[NV], sum_att[NV];
    for (int k = 0; k < NV; ++k) {
        fixed[k] = load_lanes(near + k * L, lanes_of(k));
        sum[k] = sum_att[k] = Vec<A>{};
    }
    for (int b = 0; b < block.n; ++b) {
        const T* row = far + block.other[b] * ld;
        const A high = dscore[b], low = dscore[b] * slope;
#pragma GCC unroll 4
        for (int k = 0; k < NV; ++k) {
            Vec<A> z = fixed[k] + load_lanes(row + k * L, lanes_of(k));
            if (edge) z += load_lanes(edge + block.id[b] * edge_ld + k * L, lanes_of(k));
            const Vec<A> t = z > 0 ? broadcast<A>(high) : broadcast<A>(low);
            sum[k] += t;
            sum_att[k] += t * z;
            if (dedge)
                store_lanes(dedge + block.id[b] * edge_ld + k * L, t * load_lanes(att + k * L, lanes_of(k)),
                            lanes_of(k));
        }
    }
    for (int k = 0; k < NV; ++k) {
        store_lanes(into + k * L, sum[k] + load_lanes(into + k * L, lanes_of(k)), lanes_of(k));
        if (!datt) continue;
        A part[L];
        store(part, sum_att[k]);
        add_wide(part, lanes_of(k), datt + k * L);
    }
}

template <class T>
void leaky_rows(const T* near, const T* far, int64_t ld, const T* edge, int64_t edge_ld, T* dedge,
                const EdgeBlock& block, const Acc<T>* dscore, Acc<T> slope, const Acc<T>* att, int64_t width,
                Acc<T>* into, double* datt) {
    constexpr int L = lanes<Acc<T>>;
    for (int64_t c = 0; c < width;) {
        const int64_t left = width - c;
        const int vectors = left >= 4 * L ? 4 : 1;
        const int tail = left < L ? static_cast<int>(left) : L;
        const T* e = edge ? edge + c : nullptr;
        T* de = dedge ? dedge + c : nullptr;
        double* da = datt ? datt + c : nullptr;
        if (vectors == 4)
            leaky_tile<T, 4>(near + c, far + c, ld, e, edge_ld, de, block, dscore, slope, att + c, into + c, da, L);
        else
            leaky_tile<T, 1>(near + c, far + c, ld, e, edge_ld, de, block, dscore, slope, att + c, into + c, da, tail);
        c += vectors * L;
    }
}

template <class A>
STRETTO_INLINE A sum_block(const A* values, int count) {
    constexpr int L = lanes<A>;
    Vec<A> sum{};
    for (int b = 0; b < count; b += L) sum += load_lanes(values + b, count - b < L ? count - b : L);
    return add_lanes<A>(sum);
}

template <class A>
void multiply(A* values, const A* factors, int64_t n) {
    for (int64_t k = 0; k < n; ++k) values[k] *= factors[k];
}

template <class T>
struct AttentionBackward : Attention<T> {
    using A = Acc<T>;
    using Base = Attention<T>;
    using Base::a, Base::g, Base::H, Base::F, Base::K, Base::D;
    static constexpr int B = block_edges;
    const T* grad;
    const T* grad_attr;
    const A *stats, *row_sum, *grad_alpha;
    T* dedge;
    A* dscore;
    const int64_t values, rights;  // sizes of a row's dv and dright; 0 where not wanted

    AttentionBackward(const stretto_csr& graph, const stretto_attention& args)
        : Base(graph, args),
          grad(static_cast<const T*>(a.grad)),
          grad_attr(static_cast<const T*>(a.grad_attr)),
          stats(static_cast<const A*>(a.stats)),
          row_sum(static_cast<const A*>(a.row_sum)),
          grad_alpha(static_cast<const A*>(a.grad_alpha)),
          dedge(static_cast<T*>(a.dedge)),
          dscore(static_cast<A*>(a.dscore)),
          values(a.dv ? a.value_heads * F : 0),
          rights(!a.dright                     ? 0
                 : a.form == STRETTO_SCORE_SUM ? H
                                               : a.right_heads * K) {}

    // Edges [begin, end) of source j: dv into into[0, values), dright after it, datt of this task.
    void edges(int64_t j, int64_t begin, int64_t end, int64_t ahead_end, A* into, double* datt,
               Scratch& scratch) const {
        constexpr int L = lanes<A>;
        A *score = scratch.take<A>(H * B), *inner = scratch.take<A>(H * B), *dalpha = scratch.take<A>(H * B);
        A *most = scratch.take<A>(H * B), *inverse = scratch.take<A>(H * B), *sums = scratch.take<A>(H * B);
        const bool softmax = a.form != STRETTO_SCORE_WEIGHT, dropped = a.dropout > 0;
        const A slope = this->slope, scale = this->scale;
        const T* near = this->v + j * a.ldv;
        A* dright = into + values;
        for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
            this->scores(block, j, false, score, inner);
            for (int b = 0; b < block.n; ++b) {  // d alpha of the weights after dropout
                if (!this->reads_rows())
                    prefetch_bytes(grad + block.ahead[b] * a.ldg, H * F * static_cast<int64_t>(sizeof(T)));
                const T* far = grad + block.other[b] * a.ldg;
                for (int64_t h = 0; h < H; ++h) {
                    A d = dot_rows(far + h * F, near + h * this->value_step, F);
                    if (grad_attr)
                        d += dot_rows(grad_attr + (block.other[b] * H + h) * D, this->attr + block.id[b] * D, D);
                    dalpha[h * B + b] = d;
                }
            }
            if (softmax) {
                block.fetch_ends(stats, 2 * H);
                block.fetch_ends(row_sum, H);
                gather_heads(stats, block.other, 2 * H, H, 2, block, most);
                gather_heads(stats + 1, block.other, 2 * H, H, 2, block, inverse);
                gather_heads(row_sum, block.other, H, H, 1, block, sums);
            }
            for (int64_t h = 0; h < H; ++h) {
                A *p = score + h * B, *d = dalpha + h * B;
                A factor[B], more[B];
                if (dropped) this->mask(block, h, factor);
                if (grad_alpha) gather(grad_alpha + h, block.id, H, block.n, more);
                for (int b = 0; b < block.padded; b += L) {
                    const int64_t at = h * B + b;
                    Vec<A> weight = load(p + b), down = load(d + b);
                    if (softmax) weight = exponential_of(weight - load(most + at)) * load(inverse + at);
                    if (dropped) down *= load(factor + b);
                    if (grad_alpha)
                        down += dropped && a.alpha_dropped ? load(more + b) * load(factor + b) : load(more + b);
                    if (softmax) down = weight * (down - load(sums + at));
                    if (a.form == STRETTO_SCORE_SUM) down = load(inner + at) > 0 ? down : down * slope;
                    if (a.form == STRETTO_SCORE_DOT) down *= scale;
                    store(d + b, down);
                    store(p + b, dropped ? weight * load(factor + b) : weight);
                }
                if (values) add_rows(grad + h * F, block.other, a.ldg, p, block.n, F, into + h * this->value_step);
                right_side(block, j, h, d, dright, datt);
            }
            if (dscore) {
                block.fetch_edges(dscore, H);
                for (int b = 0; b < block.n; ++b)
                    for (int64_t h = 0; h < H; ++h) dscore[block.id[b] * H + h] = dalpha[h * B + b];
            }
            if (a.dattr) attributes(block, score, dalpha);
        });
        static_assert(B % L == 0);
    }

    STRETTO_INLINE void right_side(const EdgeBlock& block, int64_t j, int64_t h, const A* ds, A* dright,
                                   double* datt) const {
        if (a.form == STRETTO_SCORE_SUM) {
            if (rights) dright[h] += sum_block(ds, block.n);
        } else if (a.form == STRETTO_SCORE_DOT) {
            if (rights)
                add_rows(this->left_rows + h * K, block.other, a.ldl, ds, block.n, K, dright + h * this->right_step);
        } else if (a.form == STRETTO_SCORE_SUM_ROWS && (rights || datt || dedge)) {
            const T* edge = this->edge_rows ? this->edge_rows + h * K : nullptr;
            leaky_rows(this->right_rows + j * a.ldr + h * this->right_step, this->left_rows + h * K, a.ldl, edge, H * K,
                       dedge ? dedge + h * K : nullptr, block, ds, this->slope, this->att + h * K, K,
                       dright + h * this->right_step, datt ? datt + h * K : nullptr);
        }
    }

    // dattr[e] = sum_h of d score * query[i, h] (d score is scaled already) + weight * grad_attr[i, h].
    void attributes(const EdgeBlock& block, const A* p, const A* ds) const {
        constexpr int L = lanes<A>;
        T* dattr = static_cast<T*>(a.dattr);
        for (int b = 0; b < block.n; ++b)
            for (int64_t k = 0; k < D; k += L) {
                const int n = static_cast<int>(D - k < L ? D - k : L);
                Vec<A> sum{};
                for (int64_t h = 0; h < H; ++h) {
                    const int64_t at = (block.other[b] * H + h) * D + k;
                    if (this->query) sum += ds[h * B + b] * load_lanes(this->query + at, n);
                    if (grad_attr) sum += p[h * B + b] * load_lanes(grad_attr + at, n);
                }
                store_lanes(dattr + block.id[b] * D + k, sum, n);
            }
    }

    int run(int threads) const {
        const bool want_att = a.datt && a.form == STRETTO_SCORE_SUM_ROWS;
        // dright of SUM_ROWS is summed without the factor att; it is needed as a place even if only datt is wanted.
        const int64_t place = rights || a.form != STRETTO_SCORE_SUM_ROWS ? rights : a.right_heads * K;
        double* parts = nullptr;  // of datt, one per task
        if (want_att && g.num_tasks > 0) {
            parts = static_cast<double*>(__builtin_calloc(static_cast<size_t>(g.num_tasks * H * K), sizeof(double)));
            if (!parts) return -2;
        }
        const int status = sum_over_rows<T>(
            g, threads, values + place, 6 * H * B * static_cast<int64_t>(sizeof(A)),
            [&](int64_t j, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch& scratch, int64_t task) {
                edges(j, begin, end, ahead_end, into, parts ? parts + task * H * K : nullptr, scratch);
            },
            [&](int64_t j, A* into) {
                A* dright = into + values;
                if (rights && a.form == STRETTO_SCORE_SUM_ROWS) multiply(dright, this->att, rights);
                if (a.dv == a.dright)  // v and right are one array
                    for (int64_t k = 0; k < values; ++k) into[k] += dright[k];
                if (values) store_scaled(static_cast<T*>(a.dv) + j * values, into, A(1), values);
                if (!rights || a.dv == a.dright) return;
                if (a.form == STRETTO_SCORE_SUM)
                    for (int64_t h = 0; h < H; ++h) static_cast<A*>(a.dright)[j * H + h] = dright[h];
                else
                    store_scaled(static_cast<T*>(a.dright) + j * rights, dright, A(1), rights);
            });
        if (want_att) {
            A* datt = static_cast<A*>(a.datt);
            for (int64_t t = 1; t < g.num_tasks; ++t) add_wide(parts + t * H * K, H * K, parts);
            for (int64_t k = 0; k < H * K; ++k) datt[k] = parts ? static_cast<A>(parts[k]) : A(0);
            __builtin_free(parts);
        }
        return status;
    }

    // dleft of scores that are sums of scalars: a row's sum of dscore, of 32 edges at a time so that long rows lose
    // fewer digits.
    template <class Index>
    void sum_scores(int64_t begin, int64_t end, int64_t ahead_end, A* into) const {
        constexpr int L = lanes<A>;
        constexpr int64_t ahead = 16;
        const auto* id = static_cast<const Index*>(g.edge_id);
        const auto at = [&](int64_t e) { return dscore + (id ? static_cast<int64_t>(id[e]) : e) * H; };
        for (int64_t first = begin; first < end; first += B) {
            const int64_t stop = first + B < end ? first + B : end;
            for (int64_t h = 0; h < H; h += L) {
                const int n = static_cast<int>(H - h < L ? H - h : L);
                Vec<A> sum{};
                for (int64_t e = first; e < stop; ++e) {
                    if (e + ahead < ahead_end) __builtin_prefetch(at(e + ahead) + h);
                    sum += load_lanes(at(e) + h, n);
                }
                store_lanes(into + h, load_lanes(into + h, n) + sum, n);
            }
        }
    }

    int run_left_scalars(int threads) const {
        return sum_over_rows<T>(
            g, threads, H, 0,
            [&](int64_t, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch&, int64_t) {
                if (g.index_bytes == 4)
                    sum_scores<int32_t>(begin, end, ahead_end, into);
                else
                    sum_scores<int64_t>(begin, end, ahead_end, into);
            },
            [&](int64_t i, A* into) {
                for (int64_t h = 0; h < H; ++h) static_cast<A*>(a.dleft)[i * H + h] = into[h];
            });
    }

    // The pass by destination.
    int run_left(int threads) const {
        if (a.form == STRETTO_SCORE_SUM) return run_left_scalars(threads);
        const int64_t lefts = a.dleft ? H * K : 0, queries = a.dquery ? H * D : 0;
        return sum_over_rows<T>(
            g, threads, lefts + queries, 2 * H * B * static_cast<int64_t>(sizeof(A)),
            [&](int64_t i, int64_t begin, int64_t end, int64_t ahead_end, A* into, Scratch& scratch, int64_t) {
                A* ds = scratch.take<A>(H * B);
                const T* right = this->right_rows;
                for_each_block(g, begin, end, ahead_end, [&](const EdgeBlock& block) {
                    block.fetch_edges(dscore, H);
                    for (int b = 0; b < block.n; ++b) {
                        prefetch_bytes(right + block.ahead[b] * a.ldr,
                                       a.right_heads * K * static_cast<int64_t>(sizeof(T)));
                        for (int64_t h = 0; h < H; ++h) ds[h * B + b] = dscore[block.id[b] * H + h];
                    }
                    for (int64_t h = 0; h < H; ++h) {
                        const A* d = ds + h * B;
                        if (lefts && a.form == STRETTO_SCORE_DOT) {
                            add_rows(right + h * this->right_step, block.other, a.ldr, d, block.n, K, into + h * K);
                        } else if (lefts) {
                            const T* edge = this->edge_rows ? this->edge_rows + h * K : nullptr;
                            leaky_rows<T>(this->left_rows + i * a.ldl + h * K, right + h * this->right_step, a.ldr,
                                          edge, H * K, nullptr, block, d, this->slope, this->att + h * K, K,
                                          into + h * K, nullptr);
                        }
                        if (queries) add_rows(this->attr, block.id, D, d, block.n, D, into + lefts + h * D);
                    }
                });
            },
            [&](int64_t i, A* into) {
                if (lefts) {
                    if (a.form == STRETTO_SCORE_SUM_ROWS) multiply(into, this->att, lefts);
                    store_scaled(static_cast<T*>(a.dleft) + i * lefts, into, A(1), lefts);
                }
                if (queries) store_scaled(static_cast<T*>(a.dquery) + i * queries, into + lefts, A(1), queries);
            });
    }
};

template <class T>
int attention_backward(const attention_backward_args& args) {
    return AttentionBackward<T>(*args.g, *args.a).run(args.threads);
}
template <class T>
int attention_left(const attention_left_args& args) {
    return AttentionBackward<T>(*args.g, *args.a).run_left(args.threads);
}

template <class T>
int row_dot(const row_dot_args& r) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const auto *p = static_cast<const T*>(r.a), *q = static_cast<const T*>(r.b);
    const auto* offset = static_cast<const A*>(r.offset);
    auto* out = static_cast<A*>(r.out);
    const int64_t chunk = (r.rows + r.tasks - 1) / r.tasks, size = r.heads * r.width;
    parallel_for(r.tasks, r.threads, [&](int64_t t) {
        const DenormalsAreZero mode(flushes<T>);
        const int64_t stop = (t + 1) * chunk < r.rows ? (t + 1) * chunk : r.rows;
        A* sums = r.sums ? static_cast<A*>(r.sums) + t * size : nullptr;
        for (int64_t k = 0; sums && k < size; ++k) sums[k] = 0;
        for (int64_t i = t * chunk; i < stop; ++i)
            for (int64_t h = 0; h < r.heads; ++h) {
                const int64_t at = h * r.width;
                Vec<A> dot{};
                for (int64_t k = at; k < at + r.width; k += L) {
                    const int n = static_cast<int>(at + r.width - k < L ? at + r.width - k : L);
                    const Vec<A> a = load_lanes(p + i * r.lda + k, n);
                    Vec<A> b = load_lanes(q + i * r.ldb + k, n);
                    if (offset) b -= load_lanes(offset + k, n);
                    if (sums) store_lanes(sums + k, load_lanes(sums + k, n) + a, n);
                    dot += a * b;
                }
                const A d = add_lanes<A>(dot);
                out[i * r.heads + h] = r.add ? out[i * r.heads + h] + d : d;
            }
    });
    return 0;
}

FOR_FLOATS(attention_backward)
FOR_FLOATS(attention_left)
FOR_FLOATS(row_dot)
}  // namespace stretto::STRETTO_ISA

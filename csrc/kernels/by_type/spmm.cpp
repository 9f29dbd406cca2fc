// Neighbour aggregation: every row of the result is held in registers while the row's edges stream by.
//
// A row of up to `tile_vectors` vectors is one register tile; wider rows take several. Sum, max and min share one loop.
// The order of additions depends on the graph and the width alone, never on threads, tiling or prefetch distance. Of a
// long row every block of edges is summed by itself, and the blocks in fp64.
#include "core/denormals.h"
#include "core/parallel.h"
#include "kernels/spmm_view.h"
#include "kernels/table.h"
#include "kernels/wide.h"

namespace stretto::STRETTO_ISA {

// Register tiles come in these sizes, in vectors. Each size is a copy of the loop, so what is rarely run gets few:
// 64-bit columns (graphs past 2^31 nodes), rows in order, the baseline instruction set, reductions other than sum.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int max_vectors = 16;  // of 32 registers
#elif defined(__AVX2__)
constexpr int max_vectors = 12;  // of 16
#else
constexpr int max_vectors = 4;
#endif

// max also serves min, by the sign of the messages.
enum class Reduce { sum, max, mul };

// Narrow rows: several edges in flight, so that the chain of dependent additions does not set the pace.
template <Reduce R, int NV>
constexpr int edges_in_flight = R != Reduce::sum ? 1
                                : NV <= 2        ? 4
                                : NV <= 4        ? 2
                                                 : 1;

constexpr int stream_ahead = 128;  // edges

template <Reduce R, class A>
STRETTO_INLINE Vec<A> identity() {
    return broadcast<A>(R == Reduce::max ? A(-__builtin_inf()) : R == Reduce::mul ? A(1) : A(0));
}

// acc <- reduce(acc, value). Counting also tells how many entries attain the maximum.
template <Reduce R, bool Ties, class A>
STRETTO_INLINE void combine(Vec<A>& acc, Vec<A>& count, Vec<A> value, Vec<A> value_count) {
    if constexpr (R == Reduce::sum) acc += value;
    if constexpr (R == Reduce::mul) acc *= value;
    if constexpr (R == Reduce::max && Ties) acc = larger_counting<A>(acc, count, value, value_count);
    if constexpr (R == Reduce::max && !Ties) acc = larger<A>(acc, value);
}

// Reduces the edges [begin, end) of one row; the last of the NV vectors has `tail` lanes. The next rows' edges follow
// this row's, so rows are prefetched beyond its end, up to edge `ahead_end`. Few instructions an edge: where the rows
// come out of a near cache, they set the pace.
template <class T, class Index, Reduce R, bool Scaled, bool Ties, int NV, int unroll, class More>
STRETTO_INLINE void reduce_edges(const SpmmView<T>& v, const Index* col, Factors<Acc<T>>& factors, More more_factors,
                                 int64_t begin, int64_t end, int64_t ahead_end, int tail, Vec<Acc<T>>* acc,
                                 Vec<Acc<T>>* count) {
    using A = Acc<T>;
    constexpr int L = lanes<A>, size = static_cast<int>(sizeof(T));
    const auto* x = reinterpret_cast<const char*>(v.x);
    const int64_t pitch = v.ldx * size, ahead = v.prefetch;
    Vec<A> lane[unroll][NV];
    for (int u = 0; u < unroll; ++u)
        for (int k = 0; k < NV; ++k) lane[u][k] = identity<R, A>();

    double wide[R == Reduce::sum ? NV * L : 1];  // the blocks that came before, of a row longer than one
    bool cut = false;
    const A* factor = nullptr;
    // Of narrow rows columns and factors are a good part of what is read, and the processor fetches such streams ahead
    // only up to the end of a page.
    const auto fetch_streams = [&](int64_t e, int64_t i) __attribute__((always_inline)) {
        if constexpr (unroll > 1 && !std::is_same_v<Index, InOrder>) __builtin_prefetch(col + e + stream_ahead);
        if constexpr (unroll > 1 && Scaled) __builtin_prefetch(factor + i + stream_ahead);
    };
    const auto fetch_ahead = [&](int64_t e, int edges) __attribute__((always_inline)) {
        if (e + ahead + edges > ahead_end) return;
#pragma GCC unroll 4
        for (int u = 0; u < edges; ++u) prefetch_bytes(x + column_of(col, e + ahead + u) * pitch, NV * L * size);
    };
    const auto add = [&](int64_t e, int64_t i, Vec<A>* into) __attribute__((always_inline)) {
        const auto* row = reinterpret_cast<const T*>(x + column_of(col, e) * pitch);
        const Vec<A> scale = Scaled ? broadcast<A>(factor[i]) : Vec<A>{};
#pragma GCC unroll 16
        for (int k = 0; k < NV; ++k) {
            const T* from = row + k * L;
            if constexpr (R == Reduce::sum && Scaled) {
                into[k] =
                    k == NV - 1 ? add_scaled_lanes(into[k], scale, from, tail) : fused(into[k], scale, load(from));
            } else if constexpr (R == Reduce::sum) {
                into[k] = k == NV - 1 ? add_lanes(into[k], from, tail) : into[k] + load(from);
            } else {
                Vec<A> value = k == NV - 1 ? load_lanes(from, tail) : load(from);
                if constexpr (Scaled) value *= scale;
                // Entries compete as stored: rounding may make two of them equal, and both then share the gradient.
                if constexpr (R == Reduce::max && !std::is_same_v<T, A>)
                    if (v.weight) value = as_stored<T>(value);
                combine<R, Ties, A>(into[k], count[k], value, broadcast<A>(1));
            }
        }
    };
    for (int64_t first = begin, last; first < end; first = last) {
        last = end;
        if (R == Reduce::sum && end - first > summed_at_once) last = first + summed_at_once;
        if constexpr (Scaled) {
            if (last > factors.end) {
                factors = more_factors(first);
                // Where a row is cut depends on the row alone: so does the order of its additions.
                if (last > factors.end) last = factors.end;
            }
            factor = factors.values + (first - factors.first);
        }
        int64_t e = first;
        for (; e + unroll <= last; e += unroll) {
            fetch_streams(e, e - first);
            fetch_ahead(e, unroll);
#pragma GCC unroll 4
            for (int u = 0; u < unroll; ++u) add(e + u, e + u - first, lane[u]);
        }
        if constexpr (unroll > 1)
            for (; e < last; ++e) {
                fetch_ahead(e, 1);
                add(e, e - first, lane[0]);
            }
        if constexpr (R == Reduce::sum) {
            if (last == end && !cut) continue;
            A part[NV * L];
            for (int k = 0; k < NV; ++k) {
                for (int u = 1; u < unroll; ++u) lane[0][k] += lane[u][k];
                store(part + k * L, lane[0][k]);
                for (int u = 0; u < unroll; ++u) lane[u][k] = Vec<A>{};
            }
            if (!cut) __builtin_memset(wide, 0, sizeof(wide));
            cut = true;
            add_wide(part, NV * L, wide);
        }
    }
    for (int k = 0; k < NV; ++k) {
        for (int u = 1; u < unroll; ++u) combine<R, false, A>(lane[0][k], count[k], lane[u][k], count[k]);
        acc[k] = lane[0][k];
    }
    if constexpr (R == Reduce::sum) {
        if (!cut) return;
        A part[NV * L];
        narrow_sums(wide, NV * L, part);
        for (int k = 0; k < NV; ++k) acc[k] = load(part + k * L);
    }
}

// Scales, adds beta * y and stores one finished row.
template <class T, Reduce R, bool Ties, int NV>
STRETTO_INLINE void finish_row(const SpmmView<T>& v, int64_t row, bool empty, int tail, Vec<Acc<T>>* acc,
                               const Vec<Acc<T>>* count) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const A scale = (v.row_scale ? v.row_scale[row] : A(1)) * v.sign;
    for (int k = 0; k < NV; ++k) {
        const int n = k == NV - 1 ? tail : L;
        Vec<A> value = (empty && R == Reduce::max ? Vec<A>{} : acc[k]) * scale;
        if (v.y) value = fused(value, broadcast<A>(v.beta), load_lanes(v.y + row * v.ldy + k * L, n));
        store_lanes(v.out + row * v.ldo + k * L, value, n);
        if constexpr (Ties) store_lanes(v.ties + row * v.ldo + k * L, count[k], n);
    }
}

// A task is whole rows, or a piece of a long one, whose partial result goes to its slot.
template <class T, class Index, Reduce R, bool Scaled, bool Ties, int NV, int unroll>
STRETTO_INLINE void run_edges(const SpmmView<T>& v, const stretto_csr& g, const int64_t* task, int tail,
                              Acc<T>* slots) {
    using A = Acc<T>;
    const auto* col = static_cast<const Index*>(g.col);
    const bool piece = task[4] >= 0;
    const int64_t last_row = task[1], task_end = task[3];
    // Rows that follow one another are fetched ahead by the processor itself.
    const int64_t ahead_end = v.prefetch > 0 && !std::is_same_v<Index, InOrder> ? task_end : 0;
    A made[Scaled ? factors_at_once : 1];
    Factors<A> factors = given_factors(v, g);
    const auto more_factors = [&](int64_t first) __attribute__((always_inline)) {
        const int64_t end = first + factors_at_once < task_end ? first + factors_at_once : task_end;
        edge_factors<T, Index>(v, g, first, end, made);
        return Factors<A>{made, first, end};
    };
    Vec<A> acc[NV], count[NV];
    for (int64_t row = task[0], begin = task[2], end; row < last_row; ++row, begin = end) {
        for (int k = 0; k < NV; ++k) count[k] = Vec<A>{};
        end = piece ? task_end : v.rowptr[row + 1];
        reduce_edges<T, Index, R, Scaled, Ties, NV, unroll>(v, col, factors, more_factors, begin, end, ahead_end, tail,
                                                            acc, count);
        if (!piece) {
            finish_row<T, R, Ties, NV>(v, row, begin == end, tail, acc, count);
            continue;
        }
        A* slot = slots + task[4] * 2 * NV * lanes<A>;
        for (int k = 0; k < NV; ++k) store(slot + k * lanes<A>, acc[k]);
        if constexpr (Ties)
            for (int k = 0; k < NV; ++k) store(slot + (NV + k) * lanes<A>, count[k]);
    }
}

template <class T, class Index, Reduce R, bool Scaled, bool Ties, int NV>
void run_task(const SpmmView<T>& v, const stretto_csr& g, const int64_t* task, int tail, Acc<T>* slots) {
    constexpr int unroll = edges_in_flight<R, NV>;
    if (unroll > 1 && v.one_chain)
        run_edges<T, Index, R, Scaled, Ties, NV, 1>(v, g, task, tail, slots);
    else
        run_edges<T, Index, R, Scaled, Ties, NV, unroll>(v, g, task, tail, slots);
}

template <class T, Reduce R, bool Ties, int NV>
void merge_hub(const SpmmView<T>& v, const int64_t* hub, int tail, const Acc<T>* slots) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    Vec<A> acc[NV], count[NV];
    for (int k = 0; k < NV; ++k) {
        acc[k] = identity<R, A>(), count[k] = Vec<A>{};
        double wide[L] = {};
        for (int64_t s = hub[1]; s < hub[2]; ++s) {
            const A* slot = slots + s * 2 * NV * L + k * L;
            if constexpr (R == Reduce::sum) {
                add_wide(slot, L, wide);
                continue;
            }
            combine<R, Ties, A>(acc[k], count[k], load(slot), Ties ? load(slot + NV * L) : Vec<A>{});
        }
        if constexpr (R == Reduce::sum) {
            A part[L];
            narrow_sums(wide, L, part);
            acc[k] = load(part);
        }
    }
    finish_row<T, R, Ties, NV>(v, hub[0], false, tail, acc, count);
}

// A register tile of some number of vectors: what to do with a task, and how to merge a cut row.
template <class T>
struct Tile {
    void (*task)(const SpmmView<T>&, const stretto_csr&, const int64_t* task, int tail, Acc<T>*);
    void (*merge)(const SpmmView<T>&, const int64_t* hub, int tail, const Acc<T>*);
    int vectors;
};

// Up to how many vectors.
template <class Index, Reduce R, bool Scaled>
constexpr int largest_tile() {
    if (R == Reduce::mul || sizeof(Index) == 8) return 1;
    if (std::is_same_v<Index, InOrder>) return R == Reduce::max ? 2 : Scaled ? 1 : 4;
    return R == Reduce::max ? 4 : max_vectors;
}

template <class T, class Index, Reduce R, bool Scaled, bool Ties, int NV = 1>
Tile<T> choose_tile(int vectors) {
    constexpr int limit = largest_tile<Index, R, Scaled>();
    if (NV >= limit || vectors <= NV) return {run_task<T, Index, R, Scaled, Ties, NV>, merge_hub<T, R, Ties, NV>, NV};
    if constexpr (NV < limit) return choose_tile<T, Index, R, Scaled, Ties, NV + 1>(vectors);
    __builtin_unreachable();
}

template <class T, class Index>
Tile<T> choose_tile_for(const spmm_args& a, int vectors) {
    if (a.reduce == STRETTO_MUL) return choose_tile<T, Index, Reduce::mul, false, false>(vectors);
    if (a.reduce != STRETTO_SUM)
        return a.ties ? choose_tile<T, Index, Reduce::max, true, true>(vectors)
                      : choose_tile<T, Index, Reduce::max, true, false>(vectors);
    return a.weight || a.col_scale ? choose_tile<T, Index, Reduce::sum, true, false>(vectors)
                                   : choose_tile<T, Index, Reduce::sum, false, false>(vectors);
}

template <class T>
int spmm(const spmm_args& a) {
    using A = Acc<T>;
    constexpr int L = lanes<A>;
    const stretto_csr& g = *a.g;
    // Per-head weights: each head is a block of columns with its own weight column. Otherwise one block.
    const bool by_head = a.weight_heads > 1;
    const int64_t blocks = by_head ? a.heads : 1, width = by_head ? a.width : a.heads * a.width;
    if (width == 0 || blocks == 0) return 0;
    const auto choose = [&](int vectors) {
        return !g.col               ? choose_tile_for<T, InOrder>(a, vectors)
               : g.index_bytes == 4 ? choose_tile_for<T, int32_t>(a, vectors)
                                    : choose_tile_for<T, int64_t>(a, vectors);
    };
    // Even register tiles: as few as fit, none much narrower than the others.
    const int64_t vectors = (width + L - 1) / L;
    int64_t limit = choose(1 << 20).vectors;
    const bool one_chain = vectors > 4 && limit > 4;
    if (a.tile > 0 && a.tile / L < limit) limit = a.tile / L > 0 ? a.tile / L : 1;
    const int64_t tiles = (vectors + limit - 1) / limit, per = (vectors + tiles - 1) / tiles;
    const int64_t used = (vectors + per - 1) / per;  // rounding up may leave fewer
    const Tile<T> whole = choose(static_cast<int>(per));
    const int64_t last_vectors = vectors - (used - 1) * per;
    const Tile<T> last = choose(static_cast<int>(last_vectors));
    const int last_tail = static_cast<int>(width - (vectors - 1) * L);

    const int64_t slot_size = 2 * per * L, total = used * blocks;
    A* slots = nullptr;
    if (g.num_slots > 0) {
        slots = static_cast<A*>(__builtin_malloc(static_cast<size_t>(g.num_slots * slot_size * total) * sizeof(A)));
        if (!slots) return -2;
    }
    const SpmmView<T> view{g.rowptr,
                           static_cast<const T*>(a.x),
                           a.ldx,
                           static_cast<const A*>(a.weight),
                           a.weight_heads,
                           static_cast<const A*>(a.col_scale),
                           static_cast<const A*>(a.row_scale),
                           static_cast<const T*>(a.y),
                           a.ldy,
                           static_cast<A>(a.beta),
                           static_cast<T*>(a.out),
                           a.ldo,
                           static_cast<A*>(a.ties),
                           a.prefetch,
                           A(a.reduce == STRETTO_MIN ? -1 : 1),
                           one_chain};
    const auto tile_at = [&](int64_t i, auto&& use) {
        const int64_t block = i / used, t = i % used;
        SpmmView<T> v = view;
        if (by_head) v.weight += block;
        const int64_t first_column = block * width + t * per * L;
        v.x += first_column;
        v.out += first_column;
        if (v.y) v.y += first_column;
        if (v.ties) v.ties += first_column;
        const bool is_last = t == used - 1;
        use(v, is_last ? last : whole, is_last ? last_tail : L, slots + i * g.num_slots * slot_size);
    };
    // Not where they decide which entry is the largest, nor where numbers are stored in 16 bits.
    const bool flush = a.reduce == STRETTO_SUM && std::is_same_v<T, A>;
    const auto run = [&](int64_t task, int64_t i) {
        tile_at(i, [&](const SpmmView<T>& v, const Tile<T>& tile, int tail, A* s) {
            tile.task(v, g, g.tasks + 5 * task, tail, s);
        });
    };
    if (a.tile > 0) {  // tile by tile over the whole graph: the gathered columns are a smaller working set
        for (int64_t i = 0; i < total; ++i)
            parallel_for(g.num_tasks, a.threads, [&](int64_t task) {
                const DenormalsAreZero mode(flush);
                run(task, i);
            });
    } else {
        parallel_for(g.num_tasks, a.threads, [&](int64_t task) {
            const DenormalsAreZero mode(flush);
            for (int64_t i = 0; i < total; ++i) run(task, i);
        });
    }
    if (g.num_hubs > 0) {
        parallel_for(g.num_hubs * total, a.threads, [&](int64_t job) {
            tile_at(job % total, [&](const SpmmView<T>& v, const Tile<T>& tile, int tail, A* s) {
                tile.merge(v, g.hubs + 3 * (job / total), tail, s);
            });
        });
        __builtin_free(slots);
    }
    return 0;
}

FOR_FLOATS(spmm)
}  // namespace stretto::STRETTO_ISA

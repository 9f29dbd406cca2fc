// The whole native surface: every exported symbol of libstretto, those of kernels by way of kernels.def.
//
// Conventions. Arrays are plain pointers; shapes are checked by the caller (stretto/kernels/native.py). Functions
// return 0, or a negative status whose text stretto_error() gives. `threads` is the number of threads to use; no result
// depends on it. Per-edge arrays are in the user's edge order when csr.edge_id is given, in CSR order when it is null.
#pragma once
#include <stdint.h>

#include "core/each.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STRETTO_API __attribute__((visibility("default")))

enum stretto_dtype { STRETTO_F32 = 0, STRETTO_F64 = 1, STRETTO_BF16 = 2, STRETTO_F16 = 3 };
enum stretto_reduce { STRETTO_SUM = 0, STRETTO_MAX = 1, STRETTO_MIN = 2, STRETTO_MUL = 3 };

// A matrix of num_rows destinations by num_cols sources. Row i holds the edges [rowptr[i], rowptr[i + 1]).
// Work is cut into tasks of about equal cost that depend on the graph alone (stretto_schedule): task t covers rows
// [tasks[5t], tasks[5t+1]) and edges [tasks[5t+2], tasks[5t+3]). A row too long for one task is cut into pieces, each a
// task with a slot tasks[5t+4] >= 0 for its partial result; hub h merges slots [hubs[3h+1], hubs[3h+2]) into row
// hubs[3h].
typedef struct {
    const int64_t* rowptr;
    const void* col;      // int32_t or int64_t by index_bytes; null: edge e has column e
    const void* edge_id;  // position of each CSR entry in the user's order, int32_t or int64_t by index_bytes; or null
    const int64_t* tasks;
    const int64_t* hubs;
    int64_t num_rows, num_cols, num_edges, num_tasks, num_hubs, num_slots;
    int64_t index_bytes;
} stretto_csr;

// ---- the library itself (core/) ----
STRETTO_API const char* stretto_version(void);
STRETTO_API const char* stretto_error(void);  // text of this thread's last negative status
STRETTO_API const char* stretto_isas(void);   // instruction sets this CPU can run, best first, separated by spaces
STRETTO_API const char* stretto_isa(void);    // the one in use
STRETTO_API int stretto_set_isa(const char* name);  // -1 if this CPU or this build does not have it
STRETTO_API const char* stretto_threading(void);    // "openmp (borrowed)" or "std::thread"
// on: the threads of the pool take numbers without a full mantissa for zero; off: as each of them did before. For
// products that torch runs on those threads; our own kernels see to it themselves. Calls come in pairs, on one thread.
STRETTO_API int stretto_flush_denormals(int on, int threads);

// ---- graph construction (core/csr.cpp, core/schedule.cpp, core/batch.cpp, core/hash.cpp) ----
// Smallest and largest of n indices (bytes: 4 or 8); n == 0 gives 0, -1.
STRETTO_API int stretto_minmax(const void* index, int64_t bytes, int64_t n, int threads, int64_t* least, int64_t* most);
// Stable counting sort of (row, col) pairs by row: rowptr [num_rows + 1], out_col and out_id [n] of out_bytes each.
// Either output may be null. Indices must lie in range. `sorted` (may be null) receives 1 if row was sorted already.
STRETTO_API int stretto_csr_build(const void* row, const void* col, int64_t bytes, int64_t n, int64_t num_rows,
                                  int threads, int64_t* rowptr, void* out_col, void* out_id, int64_t out_bytes,
                                  int* sorted);
// Whether every row's columns are in non-descending order.
STRETTO_API int stretto_csr_rows_sorted(const stretto_csr* g, int threads, int* sorted);
// The transpose, rows sorted by column: rowptr [num_cols + 1], col [n]; id [n] (may be null) maps its entries to g's
// user order when g has one, else to g's CSR order.
STRETTO_API int stretto_csr_transpose(const stretto_csr* g, int threads, int64_t* rowptr, void* col, void* id);
// Tasks of about `grain` edges-plus-rows. First call with tasks == null to learn the three counts.
STRETTO_API int stretto_schedule(const int64_t* rowptr, int64_t num_rows, int64_t grain, int64_t* counts,
                                 int64_t* tasks, int64_t* hubs);
// The graph of a mini-batch (row, col) and its transpose. pointers: both rowptr, then room for most_tasks tasks of
// each, then for as many hubs of each. entries [4 n]: col, position in the given order, the same of the transpose.
// facts [12]: smallest and largest row and column (out of range: that is all); whether rows came in order; whether the
// transpose has the same rowptr and col, and so the same tasks; tasks, hubs and slots of each.
STRETTO_API int stretto_batch_graph(const void* row, const void* col, int64_t bytes, int64_t n, int64_t num_rows,
                                    int64_t num_cols, int64_t grain, int64_t grain_t, int64_t most_tasks,
                                    int64_t* pointers, int32_t* entries, int64_t* facts);
// 128-bit hash of a byte range, at memory speed.
STRETTO_API void stretto_hash(const void* data, int64_t bytes, int threads, uint64_t* out);

// ---- sampler and loader (sampler/) ----
// Relation: one edge type in CSC form. Target v has the edges [colptr[v], colptr[v + 1]), sorted by time where there is
// one. All arrays must outlive the sampler.
typedef struct {
    const int64_t* colptr;  // [nodes of the target type + 1]
    const void* row;        // source of each edge, int32_t or int64_t by row_bytes
    const void* edge_id;    // the user's number of each edge, int32_t or int64_t by id_bytes; null: its position
    const int64_t* time;    // time of each edge (its own or its source's), or null
    const double* running;  // per target, the running sum of its edges' weights; or null
    const int64_t* fanout;  // [num_hops], -1: all
    int64_t row_bytes, id_bytes, source, target;  // source and target: node types
} stretto_relation;
typedef struct {
    int64_t num_nodes;
    const int64_t* time;  // the time of a seed that comes without one; or null
} stretto_node_type;
// Slice: rows of an array that belong to the sampled nodes (of_edges = 0) or edges (1) of a type, `stride` bytes apart.
// columns > 0: the array is int8 and becomes float, multiplied by scale[column].
typedef struct {
    const void* data;
    const float* scale;
    int64_t row_bytes, stride, of_edges, type, columns;
} stretto_slice;
enum stretto_sampling {
    STRETTO_REPLACE = 1,    // draw with replacement
    STRETTO_DISJOINT = 2,   // every seed grows a tree of its own
    STRETTO_LAYERED = 4,    // every hop samples all nodes known so far, not only the new ones
    STRETTO_LAST = 8,       // the latest edges instead of random ones
    STRETTO_INDUCED = 16,   // return all edges between the sampled nodes
    STRETTO_LABOR = 32,     // one random number per source and hop, shared by all targets
    STRETTO_SHARED = 64,    // with STRETTO_LABOR: the same numbers at every hop
    STRETTO_EDGE_ID = 128,  // return edge ids
    STRETTO_CSR = 256       // return rowptr and col beside edge_index
};
typedef struct {
    const stretto_node_type* node_types;
    const stretto_relation* relations;
    const stretto_slice* slices;
    int64_t num_node_types, num_relations, num_slices, num_hops;
    int64_t flags;
} stretto_sampling_plan;
// Seeds of one batch: node type t has counts[t] seeds at seeds[t], with times[t] or null.
typedef struct {
    uint64_t seed, epoch, batch;
    const int64_t* const* seeds;
    const int64_t* counts;
    const int64_t* const* times;
} stretto_seeds;

typedef struct stretto_sampler stretto_sampler;
typedef struct stretto_engine stretto_engine;
typedef struct stretto_slot stretto_slot;

STRETTO_API stretto_sampler* stretto_sampler_create(const stretto_sampling_plan* plan);  // null: see stretto_error()
STRETTO_API void stretto_sampler_destroy(stretto_sampler* sampler);
// Running sums of weights (F32 or F64) within each target; -1 if one is negative or not finite, or colptr is no row of
// pointers that rise to colptr[num_targets], the number of weights.
STRETTO_API int stretto_sampler_weights(const int64_t* colptr, int64_t num_targets, const void* weight, int dtype,
                                        double* running);
// Samples one batch on the calling thread. The slot must be released.
STRETTO_API int stretto_sampler_sample(stretto_sampler* sampler, const stretto_seeds* seeds, stretto_slot** slot);
// Where things lie in a slot, in bytes from its start (-1: absent). table holds
//   address, bytes;
//   per node type: nodes, n_id, tree, then nodes per hop (num_hops + 1 entries);
//   per relation:  edges, edge_index, rowptr, col, edge_id, then edges per hop (num_hops entries);
//   per slice:     offset.
// n_id, tree, edge_index [2, edges], rowptr [targets + 1] and edge_id are int64_t, col [edges] is int32_t.
STRETTO_API int64_t stretto_slot_table(stretto_slot* slot, int64_t* table, int64_t size);
STRETTO_API void stretto_slot_release(stretto_slot* slot);
// Its memory as a DLManagedTensor of bytes, whose deleter releases the slot.
STRETTO_API void* stretto_slot_tensor(stretto_slot* slot);

// An engine prepares batches on threads of its own and hands them out in the order in which they were submitted.
// Batches prepared and not yet handed out take at most `memory` bytes (one batch is always allowed). pin and unpin, if
// not null, are called with (address, bytes, flags) and (address) for every buffer: cudaHostRegister and its inverse.
STRETTO_API stretto_engine* stretto_engine_create(stretto_sampler* sampler, int threads, int64_t memory,
                                                  int (*pin)(void*, uint64_t, unsigned), int (*unpin)(void*));
STRETTO_API int stretto_engine_submit(stretto_engine* engine, const stretto_seeds* seeds);
// Waits for the next batch: 1 and *slot, 0 after timeout_ms without one, -1 if preparing it failed or none is coming.
STRETTO_API int stretto_engine_next(stretto_engine* engine, int64_t timeout_ms, stretto_slot** slot);
STRETTO_API void stretto_engine_cancel(stretto_engine* engine);   // forgets every batch not handed out
STRETTO_API void stretto_engine_destroy(stretto_engine* engine);  // joins its threads; slots handed out stay valid
// state[0]: bytes prepared and waiting, [1]: bytes kept for reuse, [2]: most of their sum so far, [3]: batches
// prepared.
STRETTO_API void stretto_engine_state(stretto_engine* engine, int64_t* state);

// ---- arguments of attention (kernels/by_type/attention_*.cpp) ----
// alpha = softmax over a row's edges of a score; out[i, h] = sum_e alpha[e, h] * v[j, h]. No array of edges x channels
// is ever made. The score of edge (i, j) and head h is
//   GIVEN     edge[e, h]
//   WEIGHT    edge[e, h] taken as alpha itself: a weighted sum, no softmax
//   SUM       leaky_relu(left[i, h] + right[j, h] + edge[e, h])                         (edge may be null)
//   SUM_ROWS  att[h] . leaky_relu(left[i, h] + right[j, h] + edge[e, h]), all of score_width  (edge may be null)
//   DOT       scale * (left[i, h] . right[j, h] + query[i, h] . attr[e])                (attr and query may be null)
enum stretto_score {
    STRETTO_SCORE_GIVEN = 0,
    STRETTO_SCORE_WEIGHT = 1,
    STRETTO_SCORE_SUM = 2,
    STRETTO_SCORE_SUM_ROWS = 3,
    STRETTO_SCORE_DOT = 4
};
// Rows (v, left and right of SUM_ROWS and DOT, edge of SUM_ROWS, attr, query and all their gradients, those of out and
// out_attr) are in the kernel's dtype; scalars (everything [., heads], att, stats, alpha) and the results out and
// out_attr in the accumulation type: backward takes their product with the gradient, where rounding them would show.
// value_heads and right_heads are `heads`, or 1 where all heads share one row. Per-edge arrays are in the user's order.
typedef struct {
    int64_t form, heads, width, score_width, attr_width, value_heads, right_heads;
    const void* v;  // [num_cols, value_heads, width], row stride ldv
    int64_t ldv;
    const void* left;  // row stride ldl
    int64_t ldl;
    const void* right;  // row stride ldr
    int64_t ldr;
    const void* att;    // [heads, score_width]
    const void* edge;   // [num_edges, heads] or [num_edges, heads * score_width]
    const void* attr;   // [num_edges, attr_width]
    const void* query;  // [num_rows, heads, attr_width]
    double slope, scale, dropout;
    uint64_t seed;          // of the dropout mask, a function of (seed, edge, head)
    int64_t alpha_dropped;  // whether `alpha` and `grad_alpha` are of the weights after dropout
    void* stats;            // [num_rows, heads, 2]: the row's largest score and the inverse of its sum of exponentials
    void* out;              // [num_rows, heads, width]
    void* out_attr;         // [num_rows, heads, attr_width]: sum of alpha * attr
    void* alpha;            // [num_edges, heads], or null
    const void* grad;       // of out, row stride ldg
    int64_t ldg;
    const void* grad_attr;   // of out_attr, or null
    const void* grad_alpha;  // of alpha, or null
    const void* row_sum;     // [num_rows, heads]: sum over the row of alpha * d alpha, that is grad . out
    void* dv;                // any of the gradients may be null
    void* dleft;
    void* dright;  // equal to dv: their sum, for v and right that are one array
    void* datt;
    void* dedge;  // SUM_ROWS: [num_edges, heads * score_width]
    void* dattr;
    void* dquery;
    void* dscore;  // [num_edges, heads]: of left + right + edge (SUM), of the score (GIVEN, WEIGHT, SUM_ROWS), scaled
                   // (DOT)
    // [E, heads], where given: forward writes every edge's score there, and backward reads it instead of computing it
    // again. GAT's must have slope >= 0: the sign of the score tells that of the leaky_relu's argument.
    void* scores;
    const void* bias;  // [heads * width], added to out; or null
} stretto_attention;

// ---- arguments of messages from edge features, of statistics and of chains ----
enum stretto_activation {
    STRETTO_ACT_ONE = 0,  // the factor is absent
    STRETTO_ACT_IDENTITY = 1,
    STRETTO_ACT_RELU = 2,
    STRETTO_ACT_SIGMOID = 3,
    STRETTO_ACT_SOFTPLUS = 4,
    STRETTO_ACT_SILU = 5
};
// out[i] = sum_e act[0](row[0][i] + col[0][j] + edge[0][e]) * act[1](row[1][i] + col[1][j] + edge[1][e]), channel by
// channel; absent terms (null) are 0. All arrays have `width` columns in the kernel's dtype; ld_*: elements from row to
// row. root, where given, adds root_scale * root[i] to out[i], and root_scale * grad[j] to dcol[0][j] (root is col[0]).
// pairs [2, num_pairs], where given: sources and destinations of pairs of nodes joined in both directions by edges with
// one row of edge features; edge_id is then the number of an edge's pair, and edge[s], dedge[s] have a row per pair.
typedef struct {
    int64_t width;
    int64_t act[2];
    const void* row[2];
    const void* col[2];
    const void* edge[2];
    void* out;
    const void* grad;
    void* drow[2];
    void* dcol[2];
    void* dedge[2];
    int64_t ld_row[2], ld_col[2], ld_edge[2];
    int64_t ld_drow[2], ld_dcol[2], ld_dedge[2];
    const void* root;
    int64_t ld_root;
    double root_scale;
    const int64_t* pairs;
    int64_t num_pairs;
} stretto_messages;
// What a call computes; gradients may be null. BY_COLUMN and SUM_BY_COLUMN take the transposed graph. BY_COLUMN: dcol
// and, without pairs, dedge. BY_ROW: drow and dedge. SUM_*: dcol or drow from dedge, made before. PAIRS: dedge of
// pairs.
enum stretto_messages_pass {
    STRETTO_MESSAGES_FORWARD = 0,
    STRETTO_MESSAGES_BY_COLUMN = 1,
    STRETTO_MESSAGES_BY_ROW = 2,
    STRETTO_MESSAGES_SUM_BY_COLUMN = 3,
    STRETTO_MESSAGES_SUM_BY_ROW = 4,
    STRETTO_MESSAGES_PAIRS = 5
};
// out[i] = sum_e p * y, y = act(x[j] + edge[e]) + shift, p = softmax over row i of temperature * y, channel by channel.
// x, edge, grad, dx, dedge in the kernel's dtype, the rest in the accumulation type. most and inverse [num_rows,
// width]: the largest temperature * y and the inverse of the sum of exponentials. detached: p counts as constant.
typedef struct {
    int64_t width, act, detached;
    double shift;
    const void* x;
    const void* edge;
    const void* temperature;  // [width]
    void* out;
    void* most;
    void* inverse;
    const void* grad;
    void* dx;
    void* dedge;
    void* dtemperature;  // [width]
} stretto_softmax_sum;
// Statistics of the messages x[j] + own[i] that each row receives (own may be null), channel by channel; 0 for a row
// without edges. place[s]: the column of out where statistic s begins, or -1; grad has out's layout. packed [num_rows,
// width * (1 + (VAR or STD) + 2 MIN + 2 MAX)] in the accumulation type: what backward leaves for its second pass.
enum stretto_statistic {
    STRETTO_STATISTIC_SUM = 0,
    STRETTO_STATISTIC_MEAN = 1,
    STRETTO_STATISTIC_MIN = 2,
    STRETTO_STATISTIC_MAX = 3,
    STRETTO_STATISTIC_VAR = 4,  // of the population
    STRETTO_STATISTIC_STD = 5,  // its root, 0 where it is at most 1e-5
    STRETTO_STATISTICS = 6
};
typedef struct {
    int64_t width;
    int64_t place[STRETTO_STATISTICS];
    const void* x;
    int64_t ld_x;
    const void* own;
    void* out;
    int64_t ld_out;
    const void* grad;
    void* packed;
    void* down;  // the gradient of own
    void* dx;
} stretto_statistics;

// Linears and activations one after the other over n rows of at most 256 values. SCALE: weight [n] has a factor for
// each row. out: where the result goes (RELU may have the same as the stage before it); in backward, what forward kept:
// of DENSE and SOFTPLUS the argument, of RELU the result. dweight, dbias: gradients, or null.
enum stretto_stage_kind {
    STRETTO_STAGE_DENSE = 0,
    STRETTO_STAGE_RELU = 1,
    STRETTO_STAGE_SOFTPLUS = 2,  // log(1 + e^x) - shift
    STRETTO_STAGE_SCALE = 3
};
typedef struct {
    int64_t kind, width;  // width: columns of the result
    const void* weight;   // DENSE: [width, columns of the argument]
    const void* bias;     // [width] or null
    double shift;
    void* out;
    void* dweight;
    void* dbias;
} stretto_stage;

// The pairs of edges of a graph whose transpose has the same rowptr and col. reverse [num_edges]: the user's numbers of
// the transpose's entries. count: how many pairs; with pair null that is all. pair [num_edges]: the pair of each edge,
// in the user's order and of the graph's index type. first, second [count]: an edge from a node to itself or a later
// one, and its reverse; ends [2, count]: source and destination of first.
STRETTO_API int stretto_pairs(const stretto_csr* g, const void* reverse, int64_t* count, void* pair, int64_t* first,
                              int64_t* second, int64_t* ends);
// out[p] = rows[first[p]]; 1 if rows[second[p]] is the same, bit by bit, for all p, else 0 and out is of no use.
STRETTO_API int stretto_pair_rows(const void* rows, int64_t row_bytes, const int64_t* first, const int64_t* second,
                                  int64_t n, void* out, int threads);

// ---- kernels (kernels.def; kernels/, one variant per instruction set) ----
#define KERNEL(name, types, ...) \
    STRETTO_API int stretto_##name(STRETTO_EACH(STRETTO_PARAMETER, __VA_ARGS__) int threads);
#include "kernels.def"

#ifdef __cplusplus
}
#endif

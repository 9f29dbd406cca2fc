// One entry per kernel and instruction set. csrc/core/abi.cpp fills the arguments and calls through the table in use.
#pragma once
#include <cstdint>

#include "abi.h"

namespace stretto {

struct SpmmArgs {
    const stretto_csr* g;
    int reduce;
    const void* x;
    int64_t ldx, heads, width;
    const void* weight;
    int64_t weight_heads;
    const void* row_scale;
    const void* col_scale;
    const void* y;
    int64_t ldy;
    double beta;
    void* out;
    int64_t ldo;
    void* ties;
    int64_t tile, prefetch;
    int threads;
};

struct ExtremumGradArgs {
    const stretto_csr* g;
    const void* x;
    int64_t heads, width;
    const void* weight;
    int64_t weight_heads;
    const void* out;
    const void* share;
    void* dx;
    void* dweight;
    int threads;
};

struct SddmmArgs {
    const stretto_csr* g;
    const void* a;
    int64_t lda;
    const void* b;
    int64_t ldb, heads, width;
    void* out;
    int threads;
};

struct EdgeArgs {
    const stretto_csr* g;
    const void* a;
    const void* b;
    int64_t width;
    void* out;
    int threads;
};

struct GatherArgs {
    const void* x;
    int64_t row_bytes;
    const void* index;
    int64_t index_bytes, n;
    void* out;
    int64_t prefetch;
    int threads;
};

struct AttentionArgs {
    const stretto_csr* g;
    const stretto_attention* a;
    int threads;
};

struct MessagesArgs {
    const stretto_csr* g;
    const stretto_messages* m;
    int pass, threads;
};

struct SoftmaxSumArgs {
    const stretto_csr* g;
    const stretto_softmax_sum* m;
    int pass, threads;
};

struct StatisticsArgs {
    const stretto_csr* g;
    const stretto_statistics* m;
    int pass, threads;
};

struct SoftplusArgs {
    const void* x;
    const void* grad;
    int64_t n;
    double shift;
    void* out;
    int threads;
};

struct RowDotArgs {
    const void* a;
    int64_t lda;
    const void* b;
    int64_t ldb, rows, heads, width;
    const void* offset;
    void* out;
    int add;
    void* sums;
    int64_t tasks;
    int threads;
};

constexpr int64_t relu_dense_most = 256;  // values of z in a row

struct ReluDenseArgs {
    const void* z;
    int64_t rows, in;
    const void* z_bias;
    const void* weight;
    int64_t out_width;
    const void* bias;
    void* out;
    const void* grad;  // the gradients are wanted where it is given
    void* dz;
    void* shares;
    int64_t tasks;
    int threads;
};

struct ProductArgs {
    const void* x;
    int64_t rows, x_stride;
    const void* w;
    int64_t in, w_row_stride, w_column_stride, out_width;
    const void* bias;
    double factor;
    int add;  // to what out holds
    void* out;
    int64_t tasks;  // 0: x [rows, in] times w [in, out_width]; else the sum over rows, in so many parts
    int threads;
    const void* y;  // null, or another [rows, y_in] whose product with v [y_in, out_width] is added
    int64_t y_stride, y_in;
    const void* v;
    int64_t v_row_stride, v_column_stride;
    void* sums;  // null, or [tasks, out_width]: those of x over its rows
};

constexpr int64_t chain_most = 256;  // values in a row

struct ChainArgs {
    const stretto_stage* stages;
    int64_t count;
    const void* rows;
    const void* grad;  // the gradients are wanted where it is given
    int64_t n, in;
    void* drows;
    void* scratch;
    int64_t tasks;
    int threads;
};

struct KernelTable {
    int (*spmm[4])(const SpmmArgs&);  // by stretto_dtype
    int (*spmm_extremum_grad[4])(const ExtremumGradArgs&);
    int (*sddmm[4])(const SddmmArgs&);
    int (*sddmm_add[2])(const EdgeArgs&);
    int (*edge_softmax[2])(const EdgeArgs&);
    int (*edge_softmax_grad[2])(const EdgeArgs&);
    int (*mul_grad[2])(const EdgeArgs&);
    int (*gather_rows)(const GatherArgs&);
    int (*gather_ceiling)(const GatherArgs&);
    int (*attention_forward[4])(const AttentionArgs&);
    int (*attention_backward[4])(const AttentionArgs&);
    int (*attention_left[4])(const AttentionArgs&);
    int (*row_dot[4])(const RowDotArgs&);
    int (*messages[4])(const MessagesArgs&);
    int (*softmax_sum[4])(const SoftmaxSumArgs&);
    int (*relu_dense[2])(const ReluDenseArgs&);
    int (*product[2])(const ProductArgs&);
    int (*chain[2])(const ChainArgs&);
    int (*statistics[4])(const StatisticsArgs&);
    int (*softplus[2])(const SoftplusArgs&);
};

namespace baseline {
const KernelTable* table();
}
namespace avx2 {
const KernelTable* table();
}
namespace avx512 {
const KernelTable* table();
}

}  // namespace stretto

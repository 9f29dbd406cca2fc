// The attention and edge-message half of the C ABI: packs the arguments and calls the table of the instruction set in
// use.
#include "abi.h"
#include "core/cpu.h"
#include "core/error.h"

using namespace stretto;

namespace {

int finish(int status) { return status == -2 ? error("out of memory for partial results") : status; }

bool bad_dtype(int dtype) { return dtype < 0 || dtype >= 4; }

}  // namespace

extern "C" {

int stretto_attention_forward(const stretto_csr* g, int dtype, const stretto_attention* a, int threads) {
    if (bad_dtype(dtype)) return error("attention_forward: dtype %d is not one of 0..3", dtype);
    return finish(kernels().attention_forward[dtype]({g, a, threads}));
}

int stretto_attention_backward(const stretto_csr* g, int dtype, const stretto_attention* a, int threads) {
    if (bad_dtype(dtype)) return error("attention_backward: dtype %d is not one of 0..3", dtype);
    return finish(kernels().attention_backward[dtype]({g, a, threads}));
}

int stretto_attention_left(const stretto_csr* g, int dtype, const stretto_attention* a, int threads) {
    if (bad_dtype(dtype)) return error("attention_left: dtype %d is not one of 0..3", dtype);
    return finish(kernels().attention_left[dtype]({g, a, threads}));
}

int stretto_row_dot(int dtype, const void* a, int64_t lda, const void* b, int64_t ldb, int64_t rows, int64_t heads,
                    int64_t width, const void* offset, void* out, int add, void* sums, int64_t tasks, int threads) {
    if (bad_dtype(dtype)) return error("row_dot: dtype %d is not one of 0..3", dtype);
    return kernels().row_dot[dtype]({a, lda, b, ldb, rows, heads, width, offset, out, add, sums, tasks, threads});
}

int stretto_edge_messages(const stretto_csr* g, int dtype, const stretto_messages* m, int pass, int threads) {
    if (bad_dtype(dtype)) return error("edge_messages: dtype %d is not one of 0..3", dtype);
    return finish(kernels().messages[dtype]({g, m, pass, threads}));
}

int stretto_edge_softmax_sum(const stretto_csr* g, int dtype, const stretto_softmax_sum* m, int pass, int threads) {
    if (bad_dtype(dtype)) return error("edge_softmax_sum: dtype %d is not one of 0..3", dtype);
    return finish(kernels().softmax_sum[dtype]({g, m, pass, threads}));
}

int stretto_neighbour_statistics(const stretto_csr* g, int dtype, const stretto_statistics* m, int pass, int threads) {
    if (bad_dtype(dtype)) return error("neighbour_statistics: dtype %d is not one of 0..3", dtype);
    return finish(kernels().statistics[dtype]({g, m, pass, threads}));
}

int stretto_softplus(int dtype, const void* x, const void* grad, int64_t n, double shift, void* out, int threads) {
    if (dtype < 0 || dtype >= 2) return error("softplus: dtype %d is not f32 or f64", dtype);
    return kernels().softplus[dtype]({x, grad, n, shift, out, threads});
}

}  // extern "C"

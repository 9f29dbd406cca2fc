// The kernel half of the C ABI: packs the arguments and calls the table of the instruction set in use.
#include "abi.h"

#include "core/cpu.h"
#include "core/error.h"

using namespace stretto;

namespace {

int finish(int status) { return status == -2 ? error("out of memory for partial results") : status; }

bool bad_dtype(int dtype, int count) { return dtype < 0 || dtype >= count; }

}  // namespace

extern "C" {

int stretto_spmm(const stretto_csr* g, int dtype, int reduce, const void* x, int64_t ldx, int64_t heads, int64_t width,
                 const void* weight, int64_t weight_heads, const void* row_scale, const void* col_scale, const void* y,
                 int64_t ldy, double beta, void* out, int64_t ldo, void* ties, int64_t tile, int64_t prefetch,
                 int threads) {
    if (bad_dtype(dtype, 4)) return error("spmm: dtype %d is not one of 0..3", dtype);
    return finish(kernels().spmm[dtype]({g, reduce, x, ldx, heads, width, weight, weight_heads, row_scale, col_scale, y,
                                         ldy, beta, out, ldo, ties, tile, prefetch, threads}));
}

int stretto_spmm_extremum_grad(const stretto_csr* g, int dtype, const void* x, int64_t heads, int64_t width,
                               const void* weight, int64_t weight_heads, const void* out, const void* share, void* dx,
                               void* dweight, int threads) {
    if (bad_dtype(dtype, 4)) return error("spmm_extremum_grad: dtype %d is not one of 0..3", dtype);
    return finish(kernels().spmm_extremum_grad[dtype](
        {g, x, heads, width, weight, weight_heads, out, share, dx, dweight, threads}));
}

int stretto_sddmm(const stretto_csr* g, int dtype, const void* a, int64_t lda, const void* b, int64_t ldb,
                  int64_t heads, int64_t width, void* out, int threads) {
    if (bad_dtype(dtype, 4)) return error("sddmm: dtype %d is not one of 0..3", dtype);
    return kernels().sddmm[dtype]({g, a, lda, b, ldb, heads, width, out, threads});
}

int stretto_sddmm_add(const stretto_csr* g, int dtype, const void* a, const void* b, int64_t heads, void* out,
                      int threads) {
    if (bad_dtype(dtype, 2)) return error("sddmm_add: dtype %d is not f32 or f64", dtype);
    return kernels().sddmm_add[dtype]({g, a, b, heads, out, threads});
}

int stretto_edge_softmax(const stretto_csr* g, int dtype, const void* score, int64_t heads, void* out, int threads) {
    if (bad_dtype(dtype, 2)) return error("edge_softmax: dtype %d is not f32 or f64", dtype);
    return kernels().edge_softmax[dtype]({g, score, nullptr, heads, out, threads});
}

int stretto_edge_softmax_grad(const stretto_csr* g, int dtype, const void* alpha, const void* grad, int64_t heads,
                              void* out, int threads) {
    if (bad_dtype(dtype, 2)) return error("edge_softmax_grad: dtype %d is not f32 or f64", dtype);
    return kernels().edge_softmax_grad[dtype]({g, alpha, grad, heads, out, threads});
}

int stretto_mul_grad(const stretto_csr* g, int dtype, const void* x, const void* grad, int64_t width, void* dx,
                     int threads) {
    if (bad_dtype(dtype, 2)) return error("mul_grad: dtype %d is not f32 or f64", dtype);
    return kernels().mul_grad[dtype]({g, x, grad, width, dx, threads});
}

int stretto_gather_rows(const void* x, int64_t row_bytes, const void* index, int64_t index_bytes, int64_t n, void* out,
                        int threads) {
    return kernels().gather_rows({x, row_bytes, index, index_bytes, n, out, 0, threads});
}

int stretto_gather_ceiling(const void* x, int64_t row_bytes, const int32_t* index, int64_t n, int64_t prefetch,
                           int threads, float* out) {
    if (row_bytes % 64)
        return error("gather_ceiling: row_bytes %ld is not a multiple of 64", static_cast<long>(row_bytes));
    return kernels().gather_ceiling({x, row_bytes, index, 4, n, out, prefetch, threads});
}

}  // extern "C"

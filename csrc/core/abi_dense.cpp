// The dense part of the C ABI: packs the arguments and calls the table of the instruction set in use.
#include "abi.h"
#include "core/cpu.h"
#include "core/error.h"

using namespace stretto;

namespace {

int run(const char* name, int dtype, const ReluDenseArgs& a) {
    if (dtype < 0 || dtype >= 2) return error("%s: dtype %d is not 0 or 1", name, dtype);
    if (a.in > relu_dense_most)
        return error("%s: in is %lld, at most %lld", name, (long long)a.in, (long long)relu_dense_most);
    const int status = kernels().relu_dense[dtype](a);
    return status == -2 ? error("%s: out of memory", name) : status;
}

int run(const char* name, int dtype, const ProductArgs& a) {
    if (dtype < 0 || dtype >= 2) return error("%s: dtype %d is not 0 or 1", name, dtype);
    const int status = kernels().product[dtype](a);
    return status == -2 ? error("%s: out of memory", name) : status;
}

int run(const char* name, int dtype, const ChainArgs& a) {
    if (dtype < 0 || dtype >= 2) return error("%s: dtype %d is not 0 or 1", name, dtype);
    int64_t widest = a.in;
    for (int64_t s = 0; s < a.count; ++s) widest = a.stages[s].width > widest ? a.stages[s].width : widest;
    if (widest > chain_most)
        return error("%s: a row has %lld values, at most %lld", name, (long long)widest, (long long)chain_most);
    if (a.count < 1 || a.n < 1) return error("%s: wanted at least one stage and one row", name);
    return kernels().chain[dtype](a);
}

}  // namespace

extern "C" {

int stretto_relu_dense(int dtype, const void* z, int64_t rows, int64_t in, const void* z_bias, const void* weight,
                       int64_t out_width, const void* bias, void* out, int threads) {
    return run("relu_dense", dtype,
               {z, rows, in, z_bias, weight, out_width, bias, out, nullptr, nullptr, nullptr, 0, threads});
}

int stretto_relu_dense_grad(int dtype, const void* z, int64_t rows, int64_t in, const void* z_bias, const void* weight,
                            int64_t out_width, const void* grad, void* dz, void* shares, int64_t tasks, int threads) {
    return run("relu_dense_grad", dtype,
               {z, rows, in, z_bias, weight, out_width, nullptr, nullptr, grad, dz, shares, tasks, threads});
}

int stretto_tall_product(int dtype, const void* x, int64_t rows, int64_t x_stride, const void* w, int64_t in,
                         int64_t w_row_stride, int64_t w_column_stride, int64_t out_width, const void* bias,
                         double factor, int add, const void* y, int64_t y_stride, int64_t y_in, const void* v,
                         int64_t v_row_stride, int64_t v_column_stride, void* out, int threads) {
    return run("tall_product", dtype,
               {x,       rows, x_stride, w,    in, w_row_stride, w_column_stride, out_width, bias, factor, add, out, 0,
                threads, y,    y_stride, y_in, v,  v_row_stride, v_column_stride, nullptr});
}

int stretto_sum_product(int dtype, const void* x, int64_t rows, int64_t x_stride, int64_t out_width, const void* w,
                        int64_t w_stride, int64_t in, void* parts, void* sums, int64_t tasks, int threads) {
    if (tasks < 1) return error("sum_product: tasks is %lld, wanted at least 1", (long long)tasks);
    return run("sum_product", dtype, {x,     rows,    x_stride, w, in, w_stride, 1, out_width, nullptr, 1.0, 0, parts,
                                      tasks, threads, nullptr,  0, 0,  nullptr,  0, 0,         sums});
}

int stretto_chain(int dtype, const void* rows, int64_t n, int64_t in, const stretto_stage* stages, int64_t count,
                  void* scratch, int threads) {
    return run("chain", dtype, {stages, count, rows, nullptr, n, in, nullptr, scratch, 0, threads});
}

int stretto_chain_grad(int dtype, const void* grad, int64_t n, int64_t in, const stretto_stage* stages, int64_t count,
                       void* drows, void* scratch, int64_t tasks, int threads) {
    return run("chain_grad", dtype, {stages, count, nullptr, grad, n, in, drows, scratch, tasks, threads});
}

}  // extern "C"

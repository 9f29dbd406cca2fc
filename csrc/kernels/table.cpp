// The kernel table of this instruction set.
#include "kernels/table.h"

#include "kernels/entries.h"
#include "kernels/extremum.h"
#include "kernels/rowwise.h"
#include "kernels/sddmm.h"

namespace stretto::STRETTO_ISA {
namespace {

template <class T>
int extremum_grad(const ExtremumGradArgs& a) {
    return a.g->index_bytes == 4 ? run_extremum_grad<T, int32_t>(a) : run_extremum_grad<T, int64_t>(a);
}
template <class T>
int sddmm(const SddmmArgs& a) {
    return a.g->index_bytes == 4 ? run_sddmm<T, int32_t>(a) : run_sddmm<T, int64_t>(a);
}
template <class A>
int sddmm_add(const EdgeArgs& a) {
    return a.g->index_bytes == 4 ? run_sddmm_add<A, int32_t>(a) : run_sddmm_add<A, int64_t>(a);
}
template <class A>
int edge_softmax(const EdgeArgs& a) {
    return a.g->index_bytes == 4 ? run_edge_softmax<A, int32_t>(a) : run_edge_softmax<A, int64_t>(a);
}
template <class A>
int edge_softmax_grad(const EdgeArgs& a) {
    return a.g->index_bytes == 4 ? run_edge_softmax_grad<A, int32_t>(a) : run_edge_softmax_grad<A, int64_t>(a);
}
template <class A>
int mul_grad(const EdgeArgs& a) {
    return a.g->index_bytes == 4 ? run_mul_grad<A, int32_t>(a) : run_mul_grad<A, int64_t>(a);
}

}  // namespace

const KernelTable* table() {
    static constexpr KernelTable all = {
        {spmm_f32, spmm_f64, spmm_bf16, spmm_f16},
        {extremum_grad<float>, extremum_grad<double>, extremum_grad<bf16>, extremum_grad<f16>},
        {sddmm<float>, sddmm<double>, sddmm<bf16>, sddmm<f16>},
        {sddmm_add<float>, sddmm_add<double>},
        {edge_softmax<float>, edge_softmax<double>},
        {edge_softmax_grad<float>, edge_softmax_grad<double>},
        {mul_grad<float>, mul_grad<double>},
        gather_rows,
        gather_ceiling,
        {attention_forward_f32, attention_forward_f64, attention_forward_bf16, attention_forward_f16},
        {attention_backward_f32, attention_backward_f64, attention_backward_bf16, attention_backward_f16},
        {attention_left_f32, attention_left_f64, attention_left_bf16, attention_left_f16},
        {row_dot_f32, row_dot_f64, row_dot_bf16, row_dot_f16},
        {messages_f32, messages_f64, messages_bf16, messages_f16},
        {softmax_sum_f32, softmax_sum_f64, softmax_sum_bf16, softmax_sum_f16},
        {relu_dense_f32, relu_dense_f64},
        {product_f32, product_f64},
        {chain_f32, chain_f64},
        {statistics_f32, statistics_f64, statistics_bf16, statistics_f16},
        {softplus_f32, softplus_f64},
    };
    return &all;
}

}  // namespace stretto::STRETTO_ISA

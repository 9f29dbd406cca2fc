// The entry points of this instruction set, one per kernel and type, defined in the .cpp files beside this one.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

int spmm_f32(const SpmmArgs&);
int spmm_f64(const SpmmArgs&);
int spmm_bf16(const SpmmArgs&);
int spmm_f16(const SpmmArgs&);
int gather_rows(const GatherArgs&);
int gather_ceiling(const GatherArgs&);
int attention_forward_f32(const AttentionArgs&);
int attention_forward_f64(const AttentionArgs&);
int attention_forward_bf16(const AttentionArgs&);
int attention_forward_f16(const AttentionArgs&);
int attention_backward_f32(const AttentionArgs&);
int attention_backward_f64(const AttentionArgs&);
int attention_backward_bf16(const AttentionArgs&);
int attention_backward_f16(const AttentionArgs&);
int attention_left_f32(const AttentionArgs&);
int attention_left_f64(const AttentionArgs&);
int attention_left_bf16(const AttentionArgs&);
int attention_left_f16(const AttentionArgs&);
int row_dot_f32(const RowDotArgs&);
int row_dot_f64(const RowDotArgs&);
int row_dot_bf16(const RowDotArgs&);
int row_dot_f16(const RowDotArgs&);
int messages_f32(const MessagesArgs&);
int messages_f64(const MessagesArgs&);
int messages_bf16(const MessagesArgs&);
int messages_f16(const MessagesArgs&);
int softmax_sum_f32(const SoftmaxSumArgs&);
int softmax_sum_f64(const SoftmaxSumArgs&);
int softmax_sum_bf16(const SoftmaxSumArgs&);
int softmax_sum_f16(const SoftmaxSumArgs&);
int relu_dense_f32(const ReluDenseArgs&);
int relu_dense_f64(const ReluDenseArgs&);
int product_f32(const ProductArgs&);
int product_f64(const ProductArgs&);
int chain_f32(const ChainArgs&);
int chain_f64(const ChainArgs&);
int statistics_f32(const StatisticsArgs&);
int statistics_f64(const StatisticsArgs&);
int statistics_bf16(const StatisticsArgs&);
int statistics_f16(const StatisticsArgs&);
int softplus_f32(const SoftplusArgs&);
int softplus_f64(const SoftplusArgs&);

}  // namespace stretto::STRETTO_ISA

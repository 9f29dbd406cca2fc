#include "kernels/attention_backward.h"
#include "kernels/attention_forward.h"
#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int attention_forward_bf16(const AttentionArgs& a) { return run_attention_forward<bf16>(a); }
int attention_backward_bf16(const AttentionArgs& a) { return run_attention_backward<bf16>(a); }
int attention_left_bf16(const AttentionArgs& a) { return run_attention_left<bf16>(a); }
int row_dot_bf16(const RowDotArgs& a) { return run_row_dot<bf16>(a); }

}  // namespace stretto::STRETTO_ISA

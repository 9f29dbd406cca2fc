#include "kernels/attention_backward.h"
#include "kernels/attention_forward.h"
#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int attention_forward_f32(const AttentionArgs& a) { return run_attention_forward<float>(a); }
int attention_backward_f32(const AttentionArgs& a) { return run_attention_backward<float>(a); }
int attention_left_f32(const AttentionArgs& a) { return run_attention_left<float>(a); }
int row_dot_f32(const RowDotArgs& a) { return run_row_dot<float>(a); }

}  // namespace stretto::STRETTO_ISA

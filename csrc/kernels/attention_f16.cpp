#include "kernels/attention_backward.h"
#include "kernels/attention_forward.h"
#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int attention_forward_f16(const AttentionArgs& a) { return run_attention_forward<f16>(a); }
int attention_backward_f16(const AttentionArgs& a) { return run_attention_backward<f16>(a); }
int attention_left_f16(const AttentionArgs& a) { return run_attention_left<f16>(a); }
int row_dot_f16(const RowDotArgs& a) { return run_row_dot<f16>(a); }

}  // namespace stretto::STRETTO_ISA

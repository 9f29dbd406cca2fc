#include "kernels/attention_backward.h"
#include "kernels/attention_forward.h"
#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int attention_forward_f64(const AttentionArgs& a) { return run_attention_forward<double>(a); }
int attention_backward_f64(const AttentionArgs& a) { return run_attention_backward<double>(a); }
int attention_left_f64(const AttentionArgs& a) { return run_attention_left<double>(a); }
int row_dot_f64(const RowDotArgs& a) { return run_row_dot<double>(a); }

}  // namespace stretto::STRETTO_ISA

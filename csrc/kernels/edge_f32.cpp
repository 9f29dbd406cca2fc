#include "kernels/edge_messages.h"
#include "kernels/edge_softmax_sum.h"
#include "kernels/entries.h"
#include "kernels/statistics.h"

int stretto::STRETTO_ISA::messages_f32(const MessagesArgs& a) { return run_messages<float>(a); }
int stretto::STRETTO_ISA::softmax_sum_f32(const SoftmaxSumArgs& a) { return run_softmax_sum<float>(a); }
int stretto::STRETTO_ISA::softplus_f32(const SoftplusArgs& a) { return run_softplus<float>(a); }
int stretto::STRETTO_ISA::statistics_f32(const StatisticsArgs& a) { return run_statistics<float>(a); }

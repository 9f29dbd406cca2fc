#include "kernels/edge_messages.h"
#include "kernels/edge_softmax_sum.h"
#include "kernels/entries.h"
#include "kernels/statistics.h"

int stretto::STRETTO_ISA::messages_f64(const MessagesArgs& a) { return run_messages<double>(a); }
int stretto::STRETTO_ISA::softmax_sum_f64(const SoftmaxSumArgs& a) { return run_softmax_sum<double>(a); }
int stretto::STRETTO_ISA::softplus_f64(const SoftplusArgs& a) { return run_softplus<double>(a); }
int stretto::STRETTO_ISA::statistics_f64(const StatisticsArgs& a) { return run_statistics<double>(a); }

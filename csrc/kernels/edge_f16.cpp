#include "kernels/edge_messages.h"
#include "kernels/edge_softmax_sum.h"
#include "kernels/entries.h"
#include "kernels/statistics.h"

int stretto::STRETTO_ISA::messages_f16(const MessagesArgs& a) { return run_messages<f16>(a); }
int stretto::STRETTO_ISA::softmax_sum_f16(const SoftmaxSumArgs& a) { return run_softmax_sum<f16>(a); }
int stretto::STRETTO_ISA::statistics_f16(const StatisticsArgs& a) { return run_statistics<f16>(a); }

#include "kernels/edge_messages.h"
#include "kernels/edge_softmax_sum.h"
#include "kernels/entries.h"
#include "kernels/statistics.h"

int stretto::STRETTO_ISA::messages_bf16(const MessagesArgs& a) { return run_messages<bf16>(a); }
int stretto::STRETTO_ISA::softmax_sum_bf16(const SoftmaxSumArgs& a) { return run_softmax_sum<bf16>(a); }
int stretto::STRETTO_ISA::statistics_bf16(const StatisticsArgs& a) { return run_statistics<bf16>(a); }

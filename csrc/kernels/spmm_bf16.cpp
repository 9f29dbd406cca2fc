#include "kernels/entries.h"
#include "kernels/spmm.h"

int stretto::STRETTO_ISA::spmm_bf16(const SpmmArgs& a) { return run_spmm<bf16>(a); }

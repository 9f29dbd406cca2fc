#include "kernels/entries.h"
#include "kernels/spmm.h"

int stretto::STRETTO_ISA::spmm_f16(const SpmmArgs& a) { return run_spmm<f16>(a); }

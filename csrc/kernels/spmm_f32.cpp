#include "kernels/entries.h"
#include "kernels/spmm.h"

int stretto::STRETTO_ISA::spmm_f32(const SpmmArgs& a) { return run_spmm<float>(a); }

#include "kernels/entries.h"
#include "kernels/spmm.h"

int stretto::STRETTO_ISA::spmm_f64(const SpmmArgs& a) { return run_spmm<double>(a); }

// The entry points of this instruction set, one per kernel and type, defined in the .cpp files beside this one.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

int spmm_f32(const SpmmArgs&);
int spmm_f64(const SpmmArgs&);
int spmm_bf16(const SpmmArgs&);
int spmm_f16(const SpmmArgs&);
int gather_rows(const GatherArgs&);
int gather_ceiling(const GatherArgs&);

}  // namespace stretto::STRETTO_ISA

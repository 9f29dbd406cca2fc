// Rows of a feature matrix into a slot.
#pragma once
#include <cstdint>

#include "abi.h"

namespace stretto {

// Copies row index[i] of the slice to row i of out, for n rows of row_bytes.
void gather_rows(const stretto_slice& slice, const int64_t* index, int64_t n, uint8_t* out);
// The same for int8 rows, times a scale per column.
void gather_scaled(const stretto_slice& slice, const int64_t* index, int64_t n, float* out);

}  // namespace stretto

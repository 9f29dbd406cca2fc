// Rows of a feature matrix into a slot.
#pragma once
#include <cstdint>

#include "abi.h"

namespace stretto {

// Copies data[index[i]] to row i of out, for n rows of row_bytes.
void gather_rows(const uint8_t* data, int64_t row_bytes, const int64_t* index, int64_t n, uint8_t* out);
// The same for int8 rows, times a scale per column.
void gather_scaled(const stretto_slice& slice, const int64_t* index, int64_t n, float* out);

}  // namespace stretto

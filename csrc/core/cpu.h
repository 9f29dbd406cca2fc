// Which instruction set the kernels run on.
#pragma once
#include "kernels/table.h"

namespace stretto {

// The kernels of the instruction set in use.
const KernelTable& kernels();

}  // namespace stretto

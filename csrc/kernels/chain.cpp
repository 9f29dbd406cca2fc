#include "kernels/chain.h"

#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int chain_f32(const ChainArgs& a) { return a.grad ? ChainOf<float>{a}.backward() : ChainOf<float>{a}.forward(); }
int chain_f64(const ChainArgs& a) { return a.grad ? ChainOf<double>{a}.backward() : ChainOf<double>{a}.forward(); }

}  // namespace stretto::STRETTO_ISA

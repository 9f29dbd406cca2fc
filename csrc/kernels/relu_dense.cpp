#include "kernels/relu_dense.h"

#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int relu_dense_f32(const ReluDenseArgs& a) { return a.grad ? run_relu_dense_grad<float>(a) : run_relu_dense<float>(a); }
int relu_dense_f64(const ReluDenseArgs& a) {
    return a.grad ? run_relu_dense_grad<double>(a) : run_relu_dense<double>(a);
}

}  // namespace stretto::STRETTO_ISA

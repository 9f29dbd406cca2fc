#include "kernels/relu_dense.h"

#include "kernels/entries.h"

namespace stretto::STRETTO_ISA {

int relu_dense_f32(const ReluDenseArgs& a) { return a.grad ? run_relu_dense_grad<float>(a) : run_relu_dense<float>(a); }
int relu_dense_f64(const ReluDenseArgs& a) {
    return a.grad ? run_relu_dense_grad<double>(a) : run_relu_dense<double>(a);
}
int product_f32(const ProductArgs& a) { return a.tasks ? run_sum_product<float>(a) : run_tall_product<float>(a); }
int product_f64(const ProductArgs& a) { return a.tasks ? run_sum_product<double>(a) : run_tall_product<double>(a); }

}  // namespace stretto::STRETTO_ISA

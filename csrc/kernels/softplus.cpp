// Softplus and its gradient, in one pass over the numbers.
#include "kernels/activations.h"

namespace stretto::STRETTO_ISA {

// Value of log(1 + e^x) - shift, or with grad its slope times grad.
template <class A>
int softplus(const softplus_args& a) {
    constexpr int64_t L = lanes<A>, chunk = 4096;
    const auto *x = static_cast<const A*>(a.x), *grad = static_cast<const A*>(a.grad);
    auto* out = static_cast<A*>(a.out);
    parallel_for((a.n + chunk - 1) / chunk, a.threads, [&](int64_t c) {
        const DenormalsAreZero mode;
        const int64_t last = (c + 1) * chunk < a.n ? (c + 1) * chunk : a.n;
        for (int64_t k = c * chunk; k < last; k += L) {
            const int n = static_cast<int>(last - k < L ? last - k : L);
            const Activated<A> y = activate<A>(STRETTO_ACT_SOFTPLUS, load_lanes(x + k, n));
            store_lanes(out + k, grad ? load_lanes(grad + k, n) * y.slope : y.value - static_cast<A>(a.shift), n);
        }
    });
    return 0;
}

FOR_WIDE(softplus)
}  // namespace stretto::STRETTO_ISA

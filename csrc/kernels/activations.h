// Activations of messages and of chains: their values and slopes.
#pragma once
#include "kernels/attention.h"

namespace stretto::STRETTO_ISA {

// log(1 + t) for t in [0, 1]: 2 artanh(t / (2 + t)), whose series in z <= 1/3 is cut below 1e-8.
STRETTO_INLINE vf32 log_one_plus(vf32 t) {
    const vf32 z = t / (t + 2.0f), s = z * z;
    vf32 p = broadcast<float>(1.0f / 15);
    p = p * s + 1.0f / 13;
    p = p * s + 1.0f / 11;
    p = p * s + 1.0f / 9;
    p = p * s + 1.0f / 7;
    p = p * s + 0.2f;
    p = p * s + 1.0f / 3;
    return 2.0f * (z + z * (p * s));
}
STRETTO_INLINE vf64 log_one_plus(vf64 t) {
    for (int i = 0; i < lanes<double>; ++i) t[i] = __builtin_log1p(t[i]);
    return t;
}

// Value and derivative of an activation.
template <class A>
struct Activated {
    Vec<A> value, slope;
};

template <class A>
STRETTO_INLINE Activated<A> activate(int64_t kind, Vec<A> u) {
    const Vec<A> one = broadcast<A>(1);
    if (kind == STRETTO_ACT_ONE) return {one, Vec<A>{}};
    if (kind == STRETTO_ACT_IDENTITY) return {u, one};
    if (kind == STRETTO_ACT_RELU)  // NaN passes, as in torch
        return {u <= 0 ? Vec<A>{} : u, u <= 0 ? Vec<A>{} : one};
    const Vec<A> t = exponential_of(u > 0 ? -u : u);  // e^-|u|, never large
    const Vec<A> half = one / (one + t);
    const Vec<A> sigmoid = u > 0 ? half : t * half;
    if (kind == STRETTO_ACT_SIGMOID) return {sigmoid, sigmoid * (one - sigmoid)};
    if (kind == STRETTO_ACT_SOFTPLUS) return {((u > 0) | (u != u) ? u : Vec<A>{}) + log_one_plus(t), sigmoid};
    return {u * sigmoid, sigmoid * (one + u * (one - sigmoid))};  // silu
}

// grad times the slope of an activation. Where ReLU is 0 nothing passes, not even a NaN, as in torch.
template <class A>
STRETTO_INLINE Vec<A> through(int64_t kind, Vec<A> grad, Vec<A> slope) {
    return kind == STRETTO_ACT_RELU ? (slope > 0 ? grad : Vec<A>{}) : grad * slope;
}

}  // namespace stretto::STRETTO_ISA

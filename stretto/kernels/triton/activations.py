"""The activations of edge messages in Triton, by their codes in csrc/abi.h: value, and gradient."""

from __future__ import annotations

import triton.language as tl

from stretto.kernels.reference_edge import ACTS
from stretto.kernels.triton.launch import jit

IDENTITY, RELU, SIGMOID, SOFTPLUS, SILU = (tl.constexpr(ACTS.index(name)) for name in ACTS[1:])


@jit
def sigmoid(u):
    """1 / (1 + exp(-u)), and exp(-|u|), which is never large."""
    t = tl.exp(tl.where(u > 0, -u, u))
    half = 1.0 / (1.0 + t)
    return tl.where(u > 0, half, t * half), t


@jit
def positive(u):
    """max(u, 0), and NaN where u is."""
    return tl.where((u > 0) | (u != u), u, 0.0)


@jit
def log_one_plus(t):
    """log(1 + t), t in [0, 1], without losing a small t: what rounding did to 1 + t is divided out again."""
    w = t + 1.0
    return tl.where(w == 1.0, t, tl.log(w) * (t / tl.where(w == 1.0, 1.0, w - 1.0)))


@jit
def value_of(u, ACT: tl.constexpr):
    """act(u)"""
    if ACT == IDENTITY:
        return u
    elif ACT == RELU:
        return positive(u)
    else:
        s, t = sigmoid(u)
        if ACT == SIGMOID:
            return s
        elif ACT == SOFTPLUS:
            return positive(u) + log_one_plus(t)
        else:
            return u * s


@jit
def through(grad, u, ACT: tl.constexpr):
    """grad * act'(u). Where ReLU is 0 nothing passes, not even a NaN; at NaN all does, as in torch."""
    if ACT == IDENTITY:
        return grad
    elif ACT == RELU:
        return tl.where(u <= 0, 0.0, grad)
    else:
        s, _ = sigmoid(u)
        if ACT == SIGMOID:
            return grad * (s * (1.0 - s))
        elif ACT == SOFTPLUS:
            return grad * s
        else:
            return grad * (s * (1.0 + u * (1.0 - s)))

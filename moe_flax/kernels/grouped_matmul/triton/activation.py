"""The gated activation and its derivative as device functions, on float32 accumulators."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _function(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    if FUNCTION == "silu":
        return x * tl.sigmoid(ALPHA * x)
    elif FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "relu":
        return _larger(x, 0.0)
    else:
        tl.static_assert(FUNCTION == "relu2")
        y = _larger(x, 0.0)
        return y * y


@triton.jit
def _derivative(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    if FUNCTION == "silu":
        s = tl.sigmoid(ALPHA * x)
        return s + ALPHA * x * s * (1.0 - s)
    elif FUNCTION == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FUNCTION == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope
    elif FUNCTION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(FUNCTION == "relu2")
        return 2.0 * _larger(x, 0.0)


@triton.jit
def activate(
    first,
    up,
    FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
    GATED: tl.constexpr,
):
    """``moe_flax.Activation`` of a gate (or, ungated, the one branch) and an up branch."""
    if LIMIT is not None and BEFORE:
        first = _smaller(first, LIMIT)
    y = _function(first, FUNCTION, ALPHA)
    if LIMIT is not None and not BEFORE:
        y = _smaller(y, LIMIT)
    if GATED:
        if LIMIT is not None:
            up = _smaller(_larger(up, -LIMIT), LIMIT)
        y = y * (up + UP_OFFSET)
    return y


@triton.jit
def activate_grad(
    grad,
    first,
    up,
    FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
    GATED: tl.constexpr,
):
    """Gradients by the first and the up branch for a gradient by `activate`'s result."""
    x = first
    if LIMIT is not None and BEFORE:
        x = _smaller(first, LIMIT)
    y = _function(x, FUNCTION, ALPHA)
    slope = _derivative(x, FUNCTION, ALPHA)
    if LIMIT is not None:
        if BEFORE:
            slope = tl.where(first <= LIMIT, slope, 0.0)
        else:
            slope = tl.where(y <= LIMIT, slope, 0.0)
            y = _smaller(y, LIMIT)
    d_up = grad * y
    if GATED:
        bounded = up
        if LIMIT is not None:
            bounded = _smaller(_larger(up, -LIMIT), LIMIT)
            d_up = tl.where((up <= LIMIT) & (up >= -LIMIT), d_up, 0.0)
        grad = grad * (bounded + UP_OFFSET)
    return grad * slope, d_up

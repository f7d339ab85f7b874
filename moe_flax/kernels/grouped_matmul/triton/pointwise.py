"""The activation and its gradient over sorted rows, for the pre-activation that training keeps."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import jax
import triton
import triton.language as tl

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import launch
from moe_flax.kernels.grouped_matmul.triton.activation import activate, activate_grad

_BLOCK = 1024


@triton.jit
def activate_kernel(
    pre_ptr, out_ptr,
    F: tl.constexpr, BRANCHES: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """pre [R, BRANCHES, F] -> out [R, F]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pre = pre_ptr + row * (BRANCHES * F) + at
    first = tl.load(pre, mask=at < F, other=0.0).to(tl.float32)
    up = first
    if BRANCHES == 2:
        up = tl.load(pre + F, mask=at < F, other=0.0).to(tl.float32)
    y = activate(first, up, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, BRANCHES == 2)
    tl.store(out_ptr + row * F + at, y.to(out_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def activate_grad_kernel(
    grad_ptr, pre_ptr, weight_ptr, pre_grad_ptr, weighted_ptr, dot_ptr,
    F: tl.constexpr, BRANCHES: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """One row: grad [R, F] by the unweighted result -> gradients by pre and by the row's weight.

    Also returns the weighted activation, the left side of the second matrix's gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < F
        grad = tl.load(grad_ptr + row * F + at, mask=inside, other=0.0).to(tl.float32)
        pre = row * (BRANCHES * F) + at
        first = tl.load(pre_ptr + pre, mask=inside, other=0.0).to(tl.float32)
        up = first
        if BRANCHES == 2:
            up = tl.load(pre_ptr + pre + F, mask=inside, other=0.0).to(tl.float32)
        y = activate(first, up, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, BRANCHES == 2)
        dots += tl.where(inside, grad * y, 0.0)
        first_grad, up_grad = activate_grad(
            grad * weight, first, up, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, BRANCHES == 2
        )
        kind = pre_grad_ptr.dtype.element_ty
        tl.store(pre_grad_ptr + pre, first_grad.to(kind), mask=inside)
        if BRANCHES == 2:
            tl.store(pre_grad_ptr + pre + F, up_grad.to(kind), mask=inside)
        tl.store(weighted_ptr + row * F + at, (y * weight).to(kind), mask=inside)
    tl.store(dot_ptr + row, tl.sum(dots, 0))


def activation_parameters(activation: Activation) -> dict:
    """An `Activation` as the constants of the kernels that fuse it."""
    return {
        "FUNCTION": activation.function,
        "ALPHA": float(activation.alpha),
        "UP_OFFSET": float(activation.up_offset),
        "LIMIT": None if activation.limit is None else float(activation.limit),
        "BEFORE": activation.clamp == "before",
    }


def activate_rows(pre: jax.Array, activation: Activation) -> jax.Array:
    """The activation of pre [R, J, F]: [R, F]."""
    rows, branches, features = pre.shape
    block = min(triton.next_power_of_2(features), _BLOCK)
    return launch.call(
        activate_kernel, pre,
        out_type=jax.ShapeDtypeStruct((rows, features), pre.dtype),
        grid=(rows, -(-features // block)), num_warps=4, name="moe_activate",
        F=features, BRANCHES=branches, BLOCK=block, **activation_parameters(activation),
    )  # fmt: skip


def activate_rows_grad(
    grad: jax.Array, pre: jax.Array, row_weight: jax.Array, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the weighted activation: by pre [R, J, F] and by the weight [R] (float32).

    Args:
      grad: [R, F], the gradient by the second product's input before it is weighted.
      pre: [R, J, F], the pre-activation.
      row_weight: [R] float32.

    Returns:
      The gradient by pre, the weighted activation [R, F] and the gradient by the weight.
    """
    rows, branches, features = pre.shape
    block = min(triton.next_power_of_2(features), _BLOCK)
    out = (
        jax.ShapeDtypeStruct(pre.shape, pre.dtype),
        jax.ShapeDtypeStruct(grad.shape, pre.dtype),
        jax.ShapeDtypeStruct((rows,), "float32"),
    )
    return launch.call(
        activate_grad_kernel, grad, pre, row_weight, out_type=out, grid=rows, num_warps=4,
        name="moe_activate_grad", F=features, BRANCHES=branches, BLOCK=block,
        **activation_parameters(activation),
    )  # fmt: skip

"""The kernels as functions of arrays: shapes, descriptors and configurations put together."""

import math
import typing as tp

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import configs, launch
from moe_flax.kernels.grouped_matmul.triton.contraction import contraction_kernel, group_sum_kernel
from moe_flax.kernels.grouped_matmul.triton.product import product_kernel
from moe_flax.kernels.grouped_matmul.triton.sorting import Plan

_PLAIN = Activation()


def dot_precision() -> str:
    """How float32 operands are multiplied, from ``jax.default_matmul_precision``."""
    name = jax.config.jax_default_matmul_precision
    if name in ("highest", "float32", "F32_F32_F32"):
        return "ieee"
    if name in ("default", "fastest", "tensorfloat32", "TF32_TF32_F32"):
        return "tf32"
    return "tf32x3"


def _descriptor(array: jax.Array, block: tuple[int, ...]):
    """A tile descriptor, or None where the layout is not one that descriptors take."""
    import jax_triton

    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    itemsize = array.dtype.itemsize
    if not launch.chip().tma or any(s * itemsize % 16 for s in strides[:-1]) or 0 in array.shape:
        return None
    if max(array.shape) >= 2**31 or block[-1] * itemsize < 16:
        return None
    return jax_triton.TensorDescriptor(array, array.shape, tuple(strides), block)


def _activation_parameters(activation: Activation) -> dict[str, tp.Any]:
    return {
        "FUNCTION": activation.function,
        "ALPHA": float(activation.alpha),
        "UP_OFFSET": float(activation.up_offset),
        "LIMIT": None if activation.limit is None else float(activation.limit),
        "BEFORE": activation.clamp == "before",
    }


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    plan: Plan,
    rows: int,
    *,
    tiles: configs.Tiles,
    transposed: bool = False,
    out_dtype=None,
    gather: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    store_pre: bool = False,
    pre: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
):
    """Runs `product_kernel`; see there for the shapes.

    Args:
      lhs: [rows or T, K] or [rows, J, K] (J contracted too).
      rhs: [G, J, K, N], or [G, J, N, K] where `transposed`.
      plan: of the rows, with tiles of `tiles.rows` rows.
      rows: rows of the result.
      gather: [rows] int32, the row of lhs that each row reads.
      bias: [G, J, N].
      activation: fuses it (with `pre`, its gradient).
      store_pre: also return the pre-activation [rows, J, N].
      pre: [rows, J, N], makes the epilogue the activation's gradient; needs `row_scale`.
      row_scale: [rows] float32.
      lhs_scale, rhs_scale: float32 scales of quantised operands, [rows of lhs] and [G, J, N].
    """
    groups, matrices = rhs.shape[:2]
    n, k = rhs.shape[2:] if transposed else rhs.shape[:1:-1]
    inner = lhs.shape[1] if lhs.ndim == 3 else 1
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    epilogue = "plain"
    branches = 1 if inner > 1 else matrices
    if activation is not None:
        epilogue = "activate" if pre is None else "activate_grad"
        branches = matrices if pre is None else pre.shape[1]
    shape = jax.ShapeDtypeStruct
    column_tiles = -(-n // tiles.columns)
    second = dot = None
    out: tp.Any = shape((rows, branches, n) if epilogue != "activate" else (rows, n), out_dtype)
    parameters = dict(
        ROWS=rows, K=k, N=n, GROUPS=groups, CAPACITY=plan.capacity, BRANCHES=branches, INNER=inner,
        TRANSPOSED=transposed, EPILOGUE=epilogue, STORE_PRE=store_pre, PRECISION=dot_precision(),
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, SPAN=tiles.span,
        **_activation_parameters(activation or _PLAIN),
    )  # fmt: skip
    if rows == 0:
        return jnp.zeros(out.shape, out_dtype)
    most = plan.capacity * column_tiles * (branches if epilogue == "plain" else 1)
    programs = min(launch.chip().multiprocessors * tiles.programs, most)
    flat = rhs.reshape(groups * matrices, *rhs.shape[2:])
    block = (tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)
    rhs_descriptor = _descriptor(flat, (1, *block))
    lhs_descriptor = None
    if gather is None:
        lhs_block = (tiles.rows, tiles.depth) if inner == 1 else (tiles.rows, 1, tiles.depth)
        lhs_descriptor = _descriptor(lhs, lhs_block)
    extra = {}
    if epilogue == "activate_grad":
        extra_out = (shape((rows, n), out_dtype), shape((column_tiles, rows), jnp.float32))
        out = (out, *extra_out)
    elif store_pre:
        out = (out, shape((rows, branches, n), out_dtype))
        extra = {"dot_ptr": dot}
    else:
        extra = {"second_ptr": second, "dot_ptr": dot}
    return launch.call(
        product_kernel, lhs_descriptor or lhs, rhs_descriptor or flat, bias, gather, row_scale, pre,
        rhs_scale, lhs_scale, plan.table, out_type=out, grid=programs, num_warps=tiles.warps,
        num_stages=tiles.stages, name=f"moe_product_{epilogue}", PROGRAMS=programs,
        LHS_DESCRIPTOR=lhs_descriptor is not None, RHS_DESCRIPTOR=rhs_descriptor is not None,
        **extra, **parameters,
    )  # fmt: skip


def contraction(
    lhs: jax.Array,
    grad: jax.Array,
    plan: Plan,
    *,
    tiles: configs.Tiles,
    out_dtype=None,
    lhs_gather: jax.Array | None = None,
    grad_gather: jax.Array | None = None,
) -> jax.Array:
    """Runs `contraction_kernel`: [R, K] x [R, N] -> [G, K, N], or [G, J, K, N] with branches."""
    k, n = lhs.shape[-1], grad.shape[-1]
    lhs_branches = lhs.shape[1] if lhs.ndim == 3 else 1
    grad_branches = grad.shape[1] if grad.ndim == 3 else 1
    branches = lhs_branches * grad_branches
    groups = plan.num_groups
    tail = (branches, k, n) if lhs.ndim + grad.ndim > 4 else (k, n)
    out = jax.ShapeDtypeStruct((groups, *tail), out_dtype or lhs.dtype)
    if 0 in (lhs.shape[0], grad.shape[0]):
        return jnp.zeros(out.shape, out.dtype)
    count = groups * branches * -(-k // tiles.depth) * -(-n // tiles.columns)
    programs = min(launch.chip().multiprocessors * tiles.programs, count)
    return launch.call(
        contraction_kernel, lhs, grad, lhs_gather, grad_gather, plan.table,
        out_type=out, grid=programs, num_warps=tiles.warps, num_stages=tiles.stages,
        name="moe_contraction", K=k, N=n, GROUPS=groups, LHS_BRANCHES=lhs_branches,
        GRAD_BRANCHES=grad_branches, PRECISION=dot_precision(), BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, SPAN=tiles.span, PROGRAMS=programs,
    )  # fmt: skip


def group_sum(
    values: jax.Array,
    plan: Plan,
    out_dtype,
    *,
    gather: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Sums each group's rows of [R, N] to [G, N], gathered by and multiplied with what is given."""
    n = values.shape[1]
    return launch.call(
        group_sum_kernel, values, gather, scale, plan.table,
        out_type=jax.ShapeDtypeStruct((plan.num_groups, n), out_dtype),
        grid=(plan.num_groups, -(-n // 128)), num_warps=4, name="moe_group_sum",
        N=n, BLOCK_M=32, BLOCK_N=128,
    )  # fmt: skip

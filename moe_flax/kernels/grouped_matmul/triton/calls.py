"""The kernels as functions of arrays: shapes, descriptors and configurations put together."""

import math
import typing as tp

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import configs, hopper, hopper_contraction, launch
from moe_flax.kernels.grouped_matmul.triton.contraction import contraction_kernel, group_sum_kernel
from moe_flax.kernels.grouped_matmul.triton.pointwise import activation_parameters
from moe_flax.kernels.grouped_matmul.triton.product import product_kernel
from moe_flax.kernels.grouped_matmul.triton.sorting import Plan


def dot_precision() -> str:
    """How float32 operands are multiplied, from ``jax.default_matmul_precision``."""
    name = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
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
    precision: str | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    short_sums: int | None = None,
) -> jax.Array:
    """Runs one grouped product over sorted rows; rows without a tile in the plan stay unwritten.

    Args:
      lhs: [rows or T, K] or [rows, J, K] (J contracted too).
      rhs: [G, J, K, N], or [G, J, N, K] where `transposed`.
      plan: of the rows, with tiles of `tiles.rows` rows.
      rows: rows of the result.
      tiles: the configuration.
      gather: [rows] int32, the row of lhs that each row reads.
      bias: [G, J, N].
      activation: fused behind the product.
      precision: of float32 operands, as `dot_precision` returns it.
      scales: of 8-bit operands, which have no bits for them: [rows] and [G, J, N] float32.
      short_sums: how many 8-bit products Hopper adds in fewer bits at a time; None is all.

    Returns:
      [rows, J, N]; [rows, N] with an activation; [rows, 1, N] where J was contracted.
    """
    groups, matrices = rhs.shape[:2]
    n, k = rhs.shape[2:] if transposed else rhs.shape[:1:-1]
    inner = lhs.shape[1] if lhs.ndim == 3 else 1
    if inner == 1:
        lhs = lhs.reshape(lhs.shape[0], k)
    branches = 1 if inner > 1 else matrices
    epilogue = "plain" if activation is None else "activate"
    out = jax.ShapeDtypeStruct(
        (rows, n) if activation is not None else (rows, branches, n), out_dtype or lhs.dtype
    )
    if 0 in out.shape or k == 0:
        return jnp.zeros(out.shape, out.dtype)
    if out.dtype.itemsize != 2:
        tiles = tiles.unspecialised()
    column_tiles = -(-n // tiles.columns) * (branches if activation is None else 1)
    programs = min(launch.chip().multiprocessors * tiles.programs, plan.capacity * column_tiles)
    flat = rhs.reshape(groups * matrices, *rhs.shape[2:])
    common: dict[str, tp.Any] = dict(
        K=k, N=n, GROUPS=groups, CAPACITY=plan.capacity, BRANCHES=branches, INNER=inner,
        TRANSPOSED=transposed, EPILOGUE=epilogue, SPAN=tiles.span, PROGRAMS=programs,
        **activation_parameters(activation or Activation()),
    )  # fmt: skip
    if tiles.specialised:
        return launch.call(
            hopper.specialised_product_kernel,
            *_hopper_operands(lhs, flat, gather, transposed, activation and matrices == 2),
            *(scales or (None, None)), bias, gather, plan.table, out_type=out, grid=programs,
            num_warps=4, name=f"moe_product_{epilogue}_sm90", ROWS_TOTAL=rows,
            STAGES=tiles.stages, **common,
        )  # fmt: skip
    block = (tiles.columns, tiles.depth) if transposed else (tiles.depth, tiles.columns)
    rhs_descriptor = _descriptor(flat, (1, *block))
    lhs_descriptor = None
    if gather is None:
        lhs_block = (tiles.rows, tiles.depth) if inner == 1 else (tiles.rows, 1, tiles.depth)
        lhs_descriptor = _descriptor(lhs, lhs_block)
    return launch.call(
        product_kernel, lhs_descriptor or lhs, rhs_descriptor or flat, *(scales or (None, None)),
        bias, gather, plan.table, out_type=out, grid=programs, num_warps=tiles.warps,
        num_stages=tiles.stages, name=f"moe_product_{epilogue}",
        LHS_DESCRIPTOR=lhs_descriptor is not None, RHS_DESCRIPTOR=rhs_descriptor is not None,
        ROWS=rows, PRECISION=precision or dot_precision(), BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, SHORT_SUMS=short_sums, **common,
    )  # fmt: skip


def _hopper_operands(lhs, rhs, gather, transposed, pair):
    """Descriptors; a transposed pair of branches is loaded 64 columns at a time, in turns."""
    import jax_triton
    from triton.experimental.gluon import language as gl

    size = rhs.dtype.itemsize
    depth = 128 // size
    layout = gl.NVMMASharedLayout(128, 8 * size, 2)
    flat = rhs.reshape(-1, rhs.shape[-1])
    rhs_block = (64 if pair else 256, depth) if transposed else (depth, 64)
    rhs = jax_triton.TensorDescriptor.from_array(flat, rhs_block, layout)
    if gather is None:
        lhs = lhs.reshape(lhs.shape[0], -1)
        lhs = jax_triton.TensorDescriptor.from_array(lhs, (64, depth), layout)
    return lhs, rhs


def contraction(
    lhs: jax.Array,
    grad: jax.Array,
    plan: Plan,
    *,
    tiles: configs.Tiles,
    out_dtype=None,
    precision: str | None = None,
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
    rows = lhs.shape[0]
    lhs_tiles = _descriptor(lhs.reshape(rows, -1), (tiles.rows, tiles.depth))
    grad_tiles = _descriptor(grad.reshape(rows, -1), (tiles.rows, tiles.columns))
    # Tiles start at multiples of 16 bytes only, and branches at multiples of K and N.
    starts = ([k] if lhs_branches > 1 else []) + ([n] if grad_branches > 1 else [])
    aligned = all(start * lhs.dtype.itemsize % 16 == 0 for start in starts)
    if lhs_tiles is None or grad_tiles is None or not aligned:
        lhs_tiles = grad_tiles = None
    if lhs_tiles is None or out.dtype.itemsize != 2:
        tiles = tiles.unspecialised()
    count = groups * branches * -(-k // tiles.depth) * -(-n // tiles.columns)
    programs = min(launch.chip().multiprocessors * tiles.programs, count)
    common: dict[str, tp.Any] = {
        "K": k, "N": n, "GROUPS": groups, "LHS_BRANCHES": lhs_branches,
        "GRAD_BRANCHES": grad_branches, "SPAN": tiles.span, "PROGRAMS": programs,
    }  # fmt: skip
    if tiles.specialised:
        return launch.call(
            hopper_contraction.specialised_contraction_kernel, *_squares(lhs, grad), lhs, grad,
            plan.table, out_type=out, grid=programs, num_warps=4, name="moe_contraction_sm90",
            STAGES=tiles.stages, **common,
        )  # fmt: skip
    return launch.call(
        contraction_kernel, lhs, grad, lhs_tiles, grad_tiles, plan.table, out_type=out,
        grid=programs, num_warps=tiles.warps, num_stages=tiles.stages, name="moe_contraction",
        PRECISION=precision or dot_precision(), BLOCK_M=tiles.rows, BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth, **common,
    )  # fmt: skip


def _squares(*operands):
    """Descriptors of [R, ..] as tiles of 64 by 64."""
    import jax_triton
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(128, 16, 2)
    flat = [x.reshape(x.shape[0], -1) for x in operands]
    return [jax_triton.TensorDescriptor.from_array(x, (64, 64), layout) for x in flat]


def group_sum(
    values: jax.Array,
    plan: Plan,
    out_dtype,
    *,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Sums each group's rows of [R, N] to [G, N], multiplied with scale [R] where given."""
    n = values.shape[1]
    return launch.call(
        group_sum_kernel, values, scale, plan.table,
        out_type=jax.ShapeDtypeStruct((plan.num_groups, n), out_dtype),
        grid=(plan.num_groups, -(-n // 128)), num_warps=4, name="moe_group_sum",
        N=n, BLOCK_M=32, BLOCK_N=128,
    )  # fmt: skip

"""Rows to float8_e4m3fn with a scale each, behind the activation or on the way to their places."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import launch
from moe_flax.kernels.grouped_matmul.triton.activation import activate
from moe_flax.kernels.grouped_matmul.triton.pointwise import activation_parameters

_WIDEST = 16384  # columns that a program holds at once; longer rows are read twice


@triton.jit
def _load(x_ptr, rows, at, ROWS: tl.constexpr, F: tl.constexpr, BRANCHES: tl.constexpr,
          ACTIVATE: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr,
          UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr, BEFORE: tl.constexpr):  # fmt: skip
    """[rows, columns] of x, or of its activation, in float32; 0 outside."""
    mask = (rows < ROWS)[:, None] & (at < F)[None, :]
    pointers = x_ptr + rows[:, None] * (BRANCHES * F) + at[None, :]
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATE:
        up = x
        if BRANCHES == 2:
            up = tl.load(pointers + F, mask=mask, other=0.0).to(tl.float32)
        x = activate(x, up, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, BRANCHES == 2)
    return x


@triton.jit
def _largest(x):
    """The largest magnitude of each row; NaN where the row holds one, as its bits lie above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _store(x, inverse, out_ptr, places_ptr, rows, at, ROWS: tl.constexpr, F: tl.constexpr,
           COPIES: tl.constexpr):  # fmt: skip
    x = x * inverse[:, None]
    x = tl.where(x > 448.0, 448.0, x)  # comparisons that leave NaN
    x = tl.where(x < -448.0, -448.0, x)
    y = x.to(out_ptr.dtype.element_ty)
    mask = (rows < ROWS)[:, None] & (at < F)[None, :]
    if places_ptr is None:
        tl.store(out_ptr + rows[:, None] * F + at[None, :], y, mask=mask)
    else:
        for copy in tl.static_range(COPIES):
            place = tl.load(places_ptr + rows * COPIES + copy, mask=rows < ROWS, other=-1)
            out = out_ptr + place[:, None].to(tl.int64) * F + at[None, :]
            tl.store(out, y, mask=mask & (place >= 0)[:, None])


@triton.jit
def quantize_kernel(
    x_ptr, places_ptr, out_ptr, scale_ptr,
    ROWS: tl.constexpr, F: tl.constexpr, BRANCHES: tl.constexpr, COPIES: tl.constexpr,
    LARGEST: tl.constexpr, ACTIVATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """x [ROWS, BRANCHES, F] -> out [.., F] and scale [..]: at the row itself, or at its places.

    places [ROWS, COPIES] (or None) says where a row is written; -1 is nowhere.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.arange(0, BLOCK_F)
    x = _load(x_ptr, rows, at, ROWS, F, BRANCHES, ACTIVATE, FUNCTION, ALPHA, UP_OFFSET, LIMIT,
              BEFORE)  # fmt: skip
    largest = _largest(x)
    for start in tl.static_range(BLOCK_F, F, BLOCK_F):
        more = _load(x_ptr, rows, start + at, ROWS, F, BRANCHES, ACTIVATE, FUNCTION, ALPHA,
                     UP_OFFSET, LIMIT, BEFORE)  # fmt: skip
        largest = tl.maximum(largest, _largest(more))
    bound = largest.to(tl.float32, bitcast=True)
    if LARGEST is not None:
        bound = tl.where(bound > LARGEST, LARGEST, bound)
    bound = tl.where(bound < 1e-12, 1e-12, bound)
    scale = tl.div_rn(bound, 448.0)
    inverse = tl.div_rn(448.0, bound)
    if places_ptr is None:
        tl.store(scale_ptr + rows, scale, mask=rows < ROWS)
    else:
        for copy in tl.static_range(COPIES):
            place = tl.load(places_ptr + rows * COPIES + copy, mask=rows < ROWS, other=-1)
            tl.store(scale_ptr + place, scale, mask=place >= 0)
    _store(x, inverse, out_ptr, places_ptr, rows, at, ROWS, F, COPIES)
    for start in tl.static_range(BLOCK_F, F, BLOCK_F):
        x = _load(x_ptr, rows, start + at, ROWS, F, BRANCHES, ACTIVATE, FUNCTION, ALPHA,
                  UP_OFFSET, LIMIT, BEFORE)  # fmt: skip
        _store(x, inverse, out_ptr, places_ptr, rows, start + at, ROWS, F, COPIES)


def quantize_rows(
    x: jax.Array,
    *,
    scale_ub: float | None = None,
    activation: Activation | None = None,
    places: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`moe_flax.quantize.quantize_rows` in one pass, with what happens to rows ahead of it.

    Args:
      x: [R, F], or the pre-activation [R, J, F] with an activation.
      scale_ub: the largest magnitude that scales allow for.
      activation: of x, ahead of its maximum.
      places: [R, K] int32, where each row is written, -1 for nowhere: R * K rows come back, those
        that are nobody's place unwritten. None leaves rows where they are.

    Returns:
      float8_e4m3fn values [rows, F] and float32 scales [rows].
    """
    rows, features = x.shape[0], x.shape[-1]
    width = min(triton.next_power_of_2(features), _WIDEST)
    height = max(1, 4096 // width)
    count = rows if places is None else places.size
    out = (
        jax.ShapeDtypeStruct((count, features), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((count,), jnp.float32),
    )
    return launch.call(
        quantize_kernel, x, places, out_type=out, grid=-(-rows // height),
        num_warps=max(4, min(16, width * height // 1024)), name="moe_quantize", ROWS=rows,
        F=features, BRANCHES=x.shape[1] if x.ndim == 3 else 1,
        COPIES=1 if places is None else places.shape[1],
        LARGEST=None if scale_ub is None else float(scale_ub), ACTIVATE=activation is not None,
        BLOCK_R=height, BLOCK_F=width, **activation_parameters(activation or Activation()),
    )  # fmt: skip

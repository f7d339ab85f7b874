"""Grouped products of float8 rows and matrices that carry scales: forward only."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_flax.kernels.batching import one_by_one


def check_scales(lhs, rhs, lhs_scale, rhs_scale, transpose_rhs: bool) -> None:
    """Raises where a product with scales is not one of float8 rows, or scales do not fit."""
    if lhs_scale is None or rhs_scale is None:
        raise ValueError("lhs_scale and rhs_scale belong together: give both or neither")
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if operand.dtype != jnp.float8_e4m3fn:
            raise TypeError(
                f"{name} of a product with scales must be float8_e4m3fn, got {operand.dtype}:"
                " moe_flax.quantize.quantize_rows makes values and scales"
            )
    if lhs.ndim != 2:
        raise ValueError(f"lhs of a product with scales must be [M, K], got shape {lhs.shape}")
    columns = (*rhs.shape[:-1], 1) if transpose_rhs else (*rhs.shape[:-2], 1, rhs.shape[-1])
    wanted = {"lhs_scale": (lhs_scale, (lhs.shape[0], 1)), "rhs_scale": (rhs_scale, columns)}
    for name, (scale, shape) in wanted.items():
        if scale.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape}, got {scale.shape} (lhs {lhs.shape},"
                f" rhs {rhs.shape}, transpose_rhs={transpose_rhs})"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def scaled_product(call, lhs, rhs, group_sizes, lhs_scale, rhs_scale) -> jax.Array:
    """The product of checked operands: by the backend's own kernel, or of the bare values.

    Args:
      call: what is fixed; its ``scaled`` runs the product on the backend.
      lhs: [M, K]; rhs: [G, (J,) K, N]; both float8_e4m3fn.
      group_sizes: [G].
      lhs_scale: [M, 1] float32; rhs_scale: one a column, [G, (J,) 1, N] or as rhs is transposed.

    Returns:
      [M, N] or [M, J, N].
    """
    return one_by_one(call.scaled)(lhs, rhs, group_sizes, lhs_scale, rhs_scale)


def _refuse(*_):
    raise TypeError(
        "products of float8 rows have no gradient: differentiate the product of the dequantised"
        " operands (moe_flax.quantize.dequantize), or keep float8 to inference"
    )


scaled_product.defvjp(_refuse, _refuse)


def scale_product(
    product: tp.Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
) -> jax.Array:
    """For backends without float8: bfloat16 holds the values, float32 the sums and the scales."""
    bare = product(
        lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), group_sizes, transpose_rhs, jnp.float32
    )
    rows = lhs.shape[0]
    columns = jnp.squeeze(rhs_scale, -1 if transpose_rhs else -2)
    columns = jnp.repeat(columns, group_sizes, axis=0, total_repeat_length=rows)
    scaled = bare * jnp.expand_dims(lhs_scale, range(2, bare.ndim)) * columns
    placed = jnp.arange(rows) < jnp.sum(group_sizes)
    return jnp.where(jnp.expand_dims(placed, range(1, bare.ndim)), scaled, 0).astype(out_dtype)

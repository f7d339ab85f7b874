"""Quantised weights: values of few bits beside float scales."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Shaped

_LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn
_SMALLEST_ROW = 1e-12  # stands in for the maximum of a row of zeros
_BLOCK = 128  # the block of DeepSeek's checkpoints, and the window where sizes leave a choice


def dequantize(
    values: Shaped[Array, "..."],
    scales: Float[Array, "..."],
    *,
    window: int | None = None,
) -> Float[Array, "..."]:
    """Multiplies values by their scales, in float32.

    Each axis of ``scales`` is 1 (one scale for the axis), the axis' full size, or the number of
    windows that cover it, the last one perhaps ragged. So [E, 1, F] scales [E, D, F] per output
    channel, [E, D / 32, F] per sub-channel window of 32, [E, ceil(D / 128), ceil(F / 128)] per
    block of 128 x 128.

    Args:
      values: any shape, any numeric dtype (int8, float8, ...).
      scales: as many axes as ``values``.
      window: the size of the windows on every axis that has them. None takes 128 where that many
        windows of 128 cover the axis, else windows that divide it evenly.

    Returns:
      float32, the shape of ``values``.

    Raises:
      ValueError: the shapes do not fit.
    """
    if values.ndim != scales.ndim:
        raise ValueError(
            f"scales must have as many axes as values, got {scales.shape} for {values.shape}"
        )
    scales = scales.astype(jnp.float32)
    for axis, (size, count) in enumerate(zip(values.shape, scales.shape, strict=True)):
        if count not in (1, size):
            axis_window = _window(size, count, window, axis, values.shape, scales.shape)
            scales = jnp.repeat(scales, axis_window, axis=axis)
            scales = jax.lax.slice_in_dim(scales, 0, size, axis=axis)
    return values.astype(jnp.float32) * scales


def _window(size: int, count: int, window: int | None, axis: int, values, scales) -> int:
    """The size of ``count`` windows over an axis."""
    if window is not None:
        allowed = [window]
    else:
        allowed = [_BLOCK, size // count] if count and size % count == 0 else [_BLOCK]
    for candidate in allowed:
        if candidate > 0 and math.ceil(size / candidate) == count:
            return candidate
    raise ValueError(
        f"axis {axis} of scales must be 1, {size} or ceil({size} / window), got {count}"
        f" (values {values}, scales {scales}, window {window}; without a window, windows of"
        f" {_BLOCK} or of a size that divides the axis are tried)"
    )


def quantize_rows(
    x: Float[Array, "... K"], *, scale_ub: float | None = None
) -> tuple[Float8e4m3fn[Array, "... K"], Float[Array, "... 1"]]:
    """Quantises each row to float8_e4m3fn with a float32 scale of its own.

    The scale is the row's largest magnitude over 448, the largest float8_e4m3fn; values are
    rounded to nearest and clamped. A row of zeros gives zeros and a small finite scale; NaN and
    infinities spoil their own row only.

    Args:
      x: [.., K], any float dtype.
      scale_ub: an upper bound of the magnitude that a scale allows for: larger values are clamped
        to it.

    Returns:
      Values [.., K] and scales [.., 1]; `dequantize` multiplies them.
    """
    wide = x.astype(jnp.float32)
    bound = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0.0)
    if scale_ub is not None:
        bound = jnp.minimum(bound, scale_ub)
    bound = jnp.maximum(bound, _SMALLEST_ROW)
    scaled = wide * (_LARGEST_FLOAT8 / bound)
    values = jnp.clip(scaled, -_LARGEST_FLOAT8, _LARGEST_FLOAT8).astype(jnp.float8_e4m3fn)
    return values, bound / _LARGEST_FLOAT8

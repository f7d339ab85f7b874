"""Quantised weights: values of few bits beside float scales."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Int8, Shaped, UInt8

_LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn
_SMALLEST_ROW = 1e-12  # stands in for the maximum of a row of zeros
_BLOCK = 128  # the block of DeepSeek's checkpoints, and the window where sizes leave a choice
_FLOAT4_WINDOW = 32  # values that share a scale in the OCP's MX formats


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

    Values of dtype uint8 are MXFP4: two float4_e2m1fn along the last axis, the first one in the low
    four bits, and scales are usually one for each 32 of them.

    Args:
      values: any shape, any numeric dtype (int8, float8, ...); uint8 is [.., K / 2], packed.
      scales: as many axes as ``values``; a float dtype, float8_e8m0fnu among them, or uint8, which
        holds the bits of a float8_e8m0fnu: s stands for 2**(s - 127).
      window: the size of the windows on every axis that has them. None takes 128 where that many
        windows of 128 cover the axis, else windows that divide it evenly; on the last axis of
        packed values 32 comes first.

    Returns:
      float32, the shape of ``values``; [.., K] where they are packed.

    Raises:
      ValueError: the shapes do not fit.
    """
    if values.ndim != scales.ndim:
        raise ValueError(
            f"scales must have as many axes as values, got {scales.shape} for {values.shape}"
        )
    packed = values.dtype == jnp.uint8
    if packed:
        values = unpack_float4(values)
    scales = _float_scales(scales)
    for axis, (size, count) in enumerate(zip(values.shape, scales.shape, strict=True)):
        if count not in (1, size):
            fours = packed and axis == values.ndim - 1 and count == -(-size // _FLOAT4_WINDOW)
            given = _FLOAT4_WINDOW if fours and window is None else window
            axis_window = _window(size, count, given, axis, values.shape, scales.shape)
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


def _float_scales(scales: jax.Array) -> jax.Array:
    """float32 of scales that are floats or the bits of a float8_e8m0fnu."""
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    bits = scales.astype(jnp.uint32)
    bits = jnp.where(bits == 0, 1 << 22, jnp.where(bits == 255, 0x7FC00000, bits << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def unpack_float4(packed: UInt8[Array, "... K//2"]) -> Float[Array, "... K"]:
    """Two float4_e2m1fn of each byte, the low four bits first, as float32."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
    codes = codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(jnp.uint32)
    size = codes & 7
    # From 1 on, two bits of exponent and one of mantissa, at float32's places.
    normal = jax.lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    size = jnp.where(size < 2, 0.5 * size.astype(jnp.float32), normal)
    return jnp.where(codes < 8, size, -size)


def quantize_blocks(
    weights: Float[Array, "... N K"], *, block: int = _BLOCK
) -> tuple[Float8e4m3fn[Array, "... N K"], Float[Array, "... n k"]]:
    """Quantises blocks of the last two axes to float8_e4m3fn, as DeepSeek's checkpoints are.

    A block's scale is its largest magnitude over 448, the largest float8_e4m3fn; 1 for a block of
    zeros.

    Args:
      weights: [.., N, K], any float dtype.
      block: the rows and columns of a block; the last ones of an axis may be fewer.

    Returns:
      Values [.., N, K] and float32 scales [.., ceil(N / block), ceil(K / block)].
    """
    n, k = weights.shape[-2:]
    wide = weights.astype(jnp.float32)
    pads = [(0, 0)] * (weights.ndim - 2) + [(0, -n % block), (0, -k % block)]
    tiles = jnp.pad(jnp.abs(wide), pads)
    tiles = tiles.reshape(*weights.shape[:-2], -(-n // block), block, -(-k // block), block)
    scales = _scales(jnp.max(tiles, axis=(-3, -1)), 448.0)
    spread = jnp.repeat(jnp.repeat(scales, block, -2), block, -1)[..., :n, :k]
    return (wide / spread).astype(jnp.float8_e4m3fn), scales


def quantize_channels(
    weights: Float[Array, "... N K"], *, axis: int = -1
) -> tuple[Int8[Array, "... N K"], Float[Array, "... N 1"]]:
    """Quantises to int8 with one scale for each output channel: its largest magnitude over 127.

    Args:
      weights: [.., N, K], any float dtype.
      axis: the contraction's, which shares a scale.

    Returns:
      Values, and float32 scales whose size on ``axis`` is 1.
    """
    wide = weights.astype(jnp.float32)
    scales = _scales(jnp.max(jnp.abs(wide), axis=axis, keepdims=True, initial=0.0), 127.0)
    return jnp.round(wide / scales).astype(jnp.int8), scales


def quantize_mxfp4(
    weights: Float[Array, "... N K"],
) -> tuple[UInt8[Array, "... N K//2"], UInt8[Array, "... N k"]]:
    """Quantises to MXFP4, float4_e2m1fn with a power of two for each 32 along the last axis.

    As the OCP's MX specification 1.0 has it: the scale's exponent is that of the largest
    magnitude less 2, values are rounded to the nearest, halves to even, and clamped to 6.

    Args:
      weights: [.., N, K], any float dtype, K even.

    Returns:
      Values [.., N, K / 2], two in a byte, the first one in the low four bits, and the bits of
      float8_e8m0fnu scales [.., N, ceil(K / 32)]; `dequantize` multiplies them.

    Raises:
      ValueError: K is odd.
    """
    size = weights.shape[-1]
    if size % 2:
        raise ValueError(f"quantize_mxfp4 packs pairs: the last axis must be even, got {size}")
    wide = weights.astype(jnp.float32)
    pads = [(0, 0)] * (weights.ndim - 1) + [(0, -size % _FLOAT4_WINDOW)]
    windows = jnp.pad(wide, pads).reshape(*weights.shape[:-1], -1, _FLOAT4_WINDOW)
    largest = jnp.max(jnp.abs(windows), axis=-1)
    exponents = jax.lax.bitcast_convert_type(largest, jnp.uint32) >> 23
    # At least 2**-126: what is smaller is no normal float32.
    exponents = jnp.where(exponents == 255, 255, jnp.maximum(exponents, 3) - 2).astype(jnp.uint8)
    scaled = windows / _float_scales(exponents)[..., None]
    # Between one code's value and the next; a half goes to the even code.
    above = [jnp.abs(scaled) > edge for edge in (0.25, 1.25, 2.5, 5.0)]
    above += [jnp.abs(scaled) >= edge for edge in (0.75, 1.75, 3.5)]
    codes = sum(x.astype(jnp.uint8) for x in above) | jnp.signbit(scaled).astype(jnp.uint8) << 3
    codes = codes.reshape(*weights.shape[:-1], -1)[..., :size]
    return codes[..., ::2] | codes[..., 1::2] << 4, exponents


def _scales(largest: jax.Array, limit: float) -> jax.Array:
    return jnp.where(largest == 0, 1.0, largest / limit)

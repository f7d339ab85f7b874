"""Quantised experts in a layer: values and scales as variables, and how both lie over a mesh."""

import math
import typing as tp

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from moe_flax.sharding import LOGICAL_AXES, LogicalAxes, MeshAxes

_BLOCK, _FLOAT4_WINDOW = 128, 32  # the windows that `quantize.dequantize` tries first


class QuantizedWeight(nnx.Variable):
    """Values of few bits: no Param, so no optimizer and no gradient touches them."""


class WeightScale(nnx.Variable):
    """The scales of a `QuantizedWeight`; no Param either."""


def is_packed(values: tp.Any) -> bool:
    """Whether each element holds two values of four bits, along the last axis."""
    return values.dtype == jnp.uint8


def stored_shape(
    shape: tuple[int, ...], *, transposed: bool = False, packed: bool = False
) -> tuple[int, ...]:
    """The shape that wi or wo has in the layer, given that of a float one, not transposed."""
    *lead, rows, columns = shape
    if transposed:
        rows, columns = columns, rows
    return (*lead, rows, columns // 2 if packed else columns)


def weight_axes(name: str, *, transposed: bool) -> tuple[str | None, ...]:
    """The logical axes of "experts.wi" or "experts.wo" as they are stored."""
    *lead, rows, columns = LOGICAL_AXES[name]
    return (*lead, columns, rows) if transposed else (*lead, rows, columns)


def scale_axes(name: str, scales: tp.Sequence[int], *, transposed: bool) -> tuple[str | None, ...]:
    """The logical axes of a weight's scales: experts, and F where more than one scale covers it.

    D is gathered before use, so scales are small enough to lie whole on each of its devices.
    """
    axes = weight_axes(name, transposed=transposed)
    return tuple(
        axis if axis == "expert" or (axis == "mlp" and count > 1) else None
        for axis, count in zip(axes, scales, strict=True)
    )


def window_of(size: int, count: int, *, packed: bool = False) -> int | None:
    """The window that `quantize.dequantize` takes ``count`` scales over ``size`` values to have.

    Args:
      size: values on an axis.
      count: scales on it; 1 is one for all.
      packed: whether it is the packed axis.

    Returns:
      The window; None where ``count`` windows do not cover the axis.
    """
    if count in (1, size):
        return size // count
    if packed and count == math.ceil(size / _FLOAT4_WINDOW):
        return _FLOAT4_WINDOW
    tried = [_BLOCK, size // count] if count and size % count == 0 else [_BLOCK]
    return next((w for w in tried if w > 0 and math.ceil(size / w) == count), None)


def fits(size: int, window: int, shards: int = 1, *, packed: bool = False) -> bool:
    """Whether scales of this window are read rightly, also by each of the shards of the axis."""
    if window_of(size, math.ceil(size / window), packed=packed) != window:
        return False
    part = size // shards
    if shards == 1 or window == size:
        return True
    if size % shards or part % window:
        return False
    return window_of(part, part // window, packed=packed) == window


def fitting_window(size: int, window: int, shards: int = 1, *, packed: bool = False) -> int:
    """The largest divisor of a window that `fits`; scales are repeated to have it."""
    divisors = (w for w in range(window, 0, -1) if window % w == 0)
    return next(w for w in divisors if w == 1 or fits(size, w, shards, packed=packed))


def check_scales_split(
    name: str, values: tp.Any, scales: tp.Any, axes: MeshAxes, *, transposed: bool
) -> None:
    """Raises a ValueError where a device would read its part of F with another's scales."""
    shards = axes.size(axes.mlp)
    if shards == 1:
        return
    dimension = weight_axes(name, transposed=transposed).index("mlp")
    packed = is_packed(values) and dimension == values.ndim - 1
    size, count = values.shape[dimension] * (2 if packed else 1), scales.shape[dimension]
    if count == 1:
        return
    window = window_of(size, count, packed=packed)
    if window is None or not fits(size, window, shards, packed=packed):
        raise ValueError(
            f"{name}_scale: {count} scales over F = {size} do not divide over mesh axes"
            f" { ({axis: axes.mesh.shape[axis] for axis in axes.mlp}) }; load the layer on that"
            " mesh, which repeats scales until they do"
        )


def quantized_logical_axes(
    scales: tp.Mapping[str, tp.Sequence[int]], *, transposed: bool
) -> LogicalAxes:
    """What `MeshAxes.logical` says of the experts' weights and scales.

    Args:
      scales: "experts.wi" and "experts.wo", where they have scales, to the shape of those.
      transposed: whether both weights lie transposed.
    """
    found = {
        name: weight_axes(name, transposed=transposed) for name in ("experts.wi", "experts.wo")
    }
    for name, shape in scales.items():
        found[f"{name}_scale"] = scale_axes(name, shape, transposed=transposed)
    return tuple(found.items())


def check_quantized(
    name: str,
    values: Shaped[Array, "..."],
    scales: Float[Array, "..."] | None,
    shape: tuple[int, ...],
    *,
    transposed: bool,
) -> None:
    """Raises where a weight and its scales do not make the layer's parameter.

    Args:
      name: "experts.wi" or "experts.wo".
      values: as stored.
      scales: as `moe_flax.quantize.dequantize` takes them, the experts' axis whole; or None.
      shape: the parameter's, as floats and not transposed.
      transposed: whether ``values`` lie transposed.
    """
    packed = scales is not None and is_packed(values)
    if packed and not transposed:
        raise ValueError(f"{name}: two values in a byte (uint8) are read transposed alone")
    wanted = stored_shape(shape, transposed=transposed, packed=packed)
    if tuple(values.shape) != wanted:
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(values.shape)}")
    if scales is None:
        if not jnp.issubdtype(values.dtype, jnp.floating) or values.dtype.itemsize < 2:
            raise TypeError(f"{name} of {values.dtype} needs {name}_scale")
        return
    if scales.ndim != values.ndim or scales.shape[0] != values.shape[0]:
        raise ValueError(
            f"{name}_scale must have {values.ndim} axes and {values.shape[0]} experts, got shape"
            f" {tuple(scales.shape)}"
        )
    for axis, (size, count) in enumerate(zip(values.shape, scales.shape, strict=True)):
        last = packed and axis == values.ndim - 1
        if window_of(2 * size if last else size, count, packed=last) is None:
            raise ValueError(
                f"{name}_scale of shape {tuple(scales.shape)}: {count} scales do not cover axis"
                f" {axis} of {name} {tuple(values.shape)}; see moe_flax.quantize.dequantize"
            )

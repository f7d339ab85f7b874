"""Token rows as 32-bit words, one row a [1, words] slab: rows can then start anywhere.

A copy on a TPU moves whole tiles. Of a two-dimensional bf16 array a tile is 16 rows, so one row
cannot be moved by itself; of a [rows, 1, words] array of 32-bit words a tile is one row. A bf16
row of D features becomes words that hold feature j in their low half and feature j + D' in their
high half, D' being half of D rounded up to whole lanes.
"""

import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LANES = 128
Ref: tp.TypeAlias = tp.Any  # of a Pallas kernel; its kinds share no public type


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is ``value`` or more."""
    return -(-value // multiple) * multiple


def row_words(features: int, dtype: jax.typing.DTypeLike) -> int:
    """32-bit words of a packed row, a multiple of 128."""
    if jnp.dtype(dtype).itemsize == 4:
        return round_up(features, LANES)
    return round_up(-(-features // 2), LANES)


def word_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What packed rows are made of: float32 as it is, pairs of bf16 as uint32."""
    return jnp.dtype(jnp.float32 if jnp.dtype(dtype).itemsize == 4 else jnp.uint32)


def pack_rows(x: Float[Array, "rows D"]) -> Array:
    """[rows, D] to [rows, 1, words]; features past D are zero."""
    words = row_words(x.shape[1], x.dtype)
    if x.dtype.itemsize == 4:
        return jnp.pad(x, ((0, 0), (0, words - x.shape[1])))[:, None, :]
    x = jnp.pad(x, ((0, 0), (0, 2 * words - x.shape[1])))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return (bits[:, :words] | (bits[:, words:] << 16))[:, None, :]


def unpack_rows(packed: Array, features: int, dtype: jax.typing.DTypeLike) -> Array:
    """The inverse of ``pack_rows``: [rows, 1, words] to [rows, D]."""
    packed = packed[:, 0, :]
    if jnp.dtype(dtype).itemsize == 4:
        return packed[:, :features]
    halves = [packed & 0xFFFF, packed >> 16]
    bits = jnp.concatenate([half.astype(jnp.uint16) for half in halves], axis=1)
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))[:, :features]

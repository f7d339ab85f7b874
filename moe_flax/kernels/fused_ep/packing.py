"""Packed rows to features and outputs to packed rows, in pieces between the products."""

import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moe_flax.kernels.fused_ep.ffn import FFN, chunks
from moe_flax.kernels.fused_ep.rows import round_up
from moe_flax.kernels.fused_ep.scratch import Scratch

RowSlice: tp.TypeAlias = slice | pl.Slice


def row_pieces(index, blocks: int, rows: int) -> list[RowSlice]:
    """The share of block ``index`` of ``blocks`` in some work on all rows, in pieces of 8.

    Where the blocks do not divide the rows the last ones do some again.
    """
    share = round_up(-(-rows // blocks), 16)
    start = 0 if blocks == 1 else pl.multiple_of(jnp.minimum(index * share, rows - share), 16)
    return [pl.ds(start + row, 8) for row in range(0, share, 8)]


def unpack(ffn: FFN, scratch: Scratch, slot, rows: RowSlice) -> None:
    """Packed words of some rows to features; what a row holds past D is zero and stays so."""
    packed, features = scratch.packed[slot, rows, 0, :], scratch.features
    if ffn.halves == 1:
        features[rows, : ffn.words] = packed
    else:
        low = jax.lax.bitcast_convert_type(packed << 16, jnp.float32)
        high = jax.lax.bitcast_convert_type(packed & jnp.uint32(0xFFFF0000), jnp.float32)
        width = min(2 * ffn.words, ffn.wi_depth) - ffn.words
        features[rows, : ffn.words] = low.astype(ffn.dtype)
        if width > 0:
            features[rows, ffn.words : ffn.words + width] = high[:, :width].astype(ffn.dtype)


def pack(ffn: FFN, scratch: Scratch, rows: RowSlice) -> None:
    """Float32 outputs of some rows to packed words."""
    for start, width in chunks(ffn.words):
        outputs = scratch.outputs[rows, start : start + width]
        if ffn.halves == 2:
            high = scratch.outputs[rows, ffn.words + start : ffn.words + start + width]
            outputs = _pair(outputs, high)
        scratch.results[rows, 0, start : start + width] = outputs


def _pair(low: jax.Array, high: jax.Array) -> jax.Array:
    """Two float32 arrays, each rounded to the nearest bf16, in one of uint32."""
    low, high = (
        jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
        for x in (low, high)
    )
    return (low >> 16) | high

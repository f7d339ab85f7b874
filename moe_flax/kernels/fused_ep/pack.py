"""Kernels that put rows into packed form and back, around the exchange.

XLA does the same in elementwise code, and then moves every row from tiles of eight rows to tiles of
one, which costs it more than the whole fused kernel. Here the copies between HBM and VMEM change
the tiling on their way, eight rows at least at a time.
"""

import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moe_flax.kernels.fused_ep.exchange import like
from moe_flax.kernels.fused_ep.rows import round_up, row_words, word_dtype

EIGHT = 8  # rows of a tile in VMEM
_PIECE = 32  # rows at work at a time
_BLOCK_BYTES = 2 * 2**20  # of packed rows, in each of two buffers


def _block_rows(rows: int, words: int) -> int:
    """Rows of a block: whole pieces, or all of them where they are few."""
    most = max(_BLOCK_BYTES // (4 * words) // _PIECE, 1) * _PIECE
    return min(most, 256, round_up(rows, _PIECE))


def _by_pieces(rows: int, body: tp.Callable[[tp.Any], None]) -> None:
    """Runs ``body`` on slices of `_PIECE` rows."""

    def step(index, carry):
        body(pl.ds(pl.multiple_of(index * _PIECE, _PIECE), _PIECE))
        return carry

    jax.lax.fori_loop(0, rows // _PIECE, step, 0)


def _low_high(x: jax.Array, words: int) -> tuple[jax.Array, jax.Array]:
    """Both halves of [rows, D] bf16: [rows, words] uint32 each, which hold the bits on top."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = jnp.pad(bits, ((0, 0), (0, 2 * words - x.shape[1])))
    return bits[:, :words], bits[:, words:]


def pack_rows(x: jax.Array, *, interpret: tp.Any = False) -> jax.Array:
    """`rows.pack_rows` in a kernel: [N, D] to [N', 1, words], N' being N up to a multiple of 8.

    Rows past N hold anything.
    """
    rows, features = x.shape
    words, dtype = row_words(features, x.dtype), word_dtype(x.dtype)
    if rows == 0:
        return jnp.zeros((0, 1, words), dtype)
    block, whole = _block_rows(rows, words), round_up(rows, EIGHT)

    def kernel(x, out):
        def piece(at):
            values = x[at, :]
            if dtype == jnp.float32:
                out[at, :] = jnp.pad(values, ((0, 0), (0, words - features)))
            else:
                low, high = _low_high(values, words)
                out[at, :] = (low >> 16) | high

        _by_pieces(block, piece)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(whole, block),),
        in_specs=[pl.BlockSpec((block, features), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((block, None, words), lambda i: (i, 0, 0)),
        out_shape=like(x, (whole, 1, words), dtype),
        interpret=interpret,
        name="moe_pack_rows",
    )(x)


def unpack_rows(
    packed: jax.Array,
    shape: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    *,
    interpret: tp.Any = False,
) -> jax.Array:
    """The inverse of `pack_rows`: [N', 1, words] to ``shape``, [N, D] with N at most N'."""
    (rows, features), words = shape, packed.shape[2]
    if rows == 0:
        return jnp.zeros(shape, dtype)
    block = _block_rows(rows, words)

    def kernel(packed, out):
        def piece(at):
            values = packed[at, :]
            if values.dtype == jnp.float32:
                out[at, :] = values[:, :features]
                return
            low = jax.lax.bitcast_convert_type(values << 16, jnp.float32)
            high = jax.lax.bitcast_convert_type(values & jnp.uint32(0xFFFF0000), jnp.float32)
            both = jnp.concatenate([low, high], axis=1)[:, :features]
            out[at, :] = both.astype(out.dtype)

        _by_pieces(block, piece)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block),),
        in_specs=[pl.BlockSpec((block, None, words), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((block, features), lambda i: (i, 0)),
        out_shape=like(packed, shape, dtype),
        interpret=interpret,
        name="moe_unpack_rows",
    )(packed)

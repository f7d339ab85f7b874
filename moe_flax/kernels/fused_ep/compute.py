"""The FFN of one row tile: both products block by block, scales, biases, activation."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moe_flax.kernels.fused_ep.ffn import COLUMNS, FFN, chunks
from moe_flax.kernels.fused_ep.packing import RowSlice, pack, row_pieces, unpack
from moe_flax.kernels.fused_ep.rows import LANES
from moe_flax.kernels.fused_ep.scratch import Scratch


def _product(rows, weight, dtype):
    precision = jax.lax.Precision.HIGHEST if dtype.itemsize == 4 else None
    return jax.lax.dot_general(
        rows,
        weight,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _load(weight, scale, window: int, dtype) -> jax.Array:
    """A block's columns as the product's operand; windows shorter than it are scaled here."""
    if scale is None or scale.shape[0] == 1:
        return weight if weight.dtype == dtype else weight.astype(jnp.float32).astype(dtype)
    windows, columns = scale.shape
    depth = windows * window
    weight = weight.astype(jnp.float32)
    scaled = weight[:depth].reshape(windows, window, columns) * scale[:, None, :]
    scaled = scaled.reshape(depth, columns)
    if depth < weight.shape[0]:
        scaled = jnp.pad(scaled, ((0, weight.shape[0] - depth), (0, 0)))
    return scaled.astype(dtype)


def _finish(product, scale, bias):
    """A per-channel scale and the bias, on the float32 product."""
    if scale is not None and scale.shape[0] == 1:
        product = product * scale
    return product if bias is None else product + bias


def _columns(ref, slot, *rest):
    return None if ref is None else ref[(slot, *rest)]


class Compute:
    """The two phases on one tile of ``rows`` rows.

    Blocks of the first product also pack the results of the tile before: work for the vector
    units that the scheduler has done while the MXUs multiply.
    """

    def __init__(self, ffn: FFN, scratch: Scratch, rows: int):
        self.ffn, self.scratch, self.rows = ffn, scratch, rows

    def first(self, index, slot) -> None:
        """Hidden columns of block ``index``, its weights in ``slot``."""
        ffn, rows, gates = self.ffn, self.rows, self.scratch.gate
        parts = chunks(ffn.hidden_block)
        work = row_pieces(index, ffn.hidden_blocks, rows)
        shares = len(parts) * ffn.branches  # of the packing: one after each product
        for number, (start, width) in enumerate(parts):
            columns = pl.ds(start, width)
            share = number * ffn.branches
            hidden = ffn.activation.activate(self._first_product(slot, 0, columns))
            if ffn.branches == 2:
                gates[:rows, columns] = hidden
                self._pack(work[share::shares])
                up = self._first_product(slot, 1, columns)
                hidden = ffn.activation.multiply(gates[:rows, columns], up)
                share += 1
            self._pack(work[share::shares])
            self._keep_hidden(index * ffn.hidden_block + start, hidden)

    def _first_product(self, slot, branch: int, columns) -> jax.Array:
        ffn, (weight, scale, bias) = self.ffn, self.scratch.wi
        scales = _columns(scale, slot, branch, slice(None), columns)
        loaded = _load(weight[slot, branch, :, columns], scales, ffn.wi_window, ffn.dtype)
        product = _product(self.scratch.features[: self.rows], loaded, ffn.dtype)
        return _finish(product, scales, _columns(bias, slot, branch, slice(None), columns))

    def _keep_hidden(self, start, hidden: jax.Array) -> None:
        """Rounds hidden columns from ``start`` on, those past F being zero."""
        ffn, width = self.ffn, hidden.shape[1]
        start = pl.multiple_of(start, LANES)
        if ffn.hidden % ffn.hidden_block:
            column = jax.lax.broadcasted_iota(jnp.int32, hidden.shape, 1) + start
            hidden = jnp.where(column < ffn.hidden, hidden, 0)
        self.scratch.hidden[: self.rows, pl.ds(start, width)] = hidden.astype(ffn.dtype)

    def second(self, index, slot) -> None:
        """Output columns of block ``index`` in each half of a packed row."""
        ffn, block = self.ffn, self.ffn.feature_block
        hidden = self.scratch.hidden[: self.rows, : ffn.wo_depth]
        if ffn.halves == 2 and 2 * block <= COLUMNS:
            both = self._second_product(hidden, slot, 0, 2 * block)
            self._keep_outputs(0, index, 0, both[:, :block])
            self._keep_outputs(1, index, 0, both[:, block:])
            return
        for half in range(ffn.halves):
            for start, width in chunks(block):
                outputs = self._second_product(hidden, slot, half * block + start, width)
                self._keep_outputs(half, index, start, outputs)

    def _second_product(self, hidden, slot, start: int, width: int) -> jax.Array:
        ffn, (weight, scale, bias) = self.ffn, self.scratch.wo
        columns = pl.ds(start, width)
        scales = _columns(scale, slot, slice(None), columns)
        loaded = _load(weight[slot, :, columns], scales, ffn.wo_window, ffn.dtype)
        product = _product(hidden, loaded, ffn.dtype)
        return _finish(product, scales, _columns(bias, slot, slice(None), columns))

    def _keep_outputs(self, half: int, index, start: int, outputs: jax.Array) -> None:
        place = half * self.ffn.words + index * self.ffn.feature_block + start
        place = pl.multiple_of(place, LANES)
        self.scratch.outputs[: self.rows, pl.ds(place, outputs.shape[1])] = outputs

    def unpack(self, slot) -> None:
        """The tile that arrived in ``slot`` becomes the tile at work."""
        for piece in row_pieces(0, 1, self.rows):
            unpack(self.ffn, self.scratch, slot, piece)

    def pack(self) -> None:
        """All results of the tile before."""
        self._pack(row_pieces(0, 1, self.rows))

    def _pack(self, pieces: list[RowSlice]) -> None:
        for piece in pieces:
            pack(self.ffn, self.scratch, piece)

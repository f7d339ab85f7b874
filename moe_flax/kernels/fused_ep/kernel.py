"""The kernel: rows to their experts, the gated FFN over streamed weights, rows back.

Row tiles of one expert after another run through two phases. Phase 1 takes the first product
block of hidden columns by block and leaves the activated hidden rows in VMEM; phase 2 takes the
second product block of feature columns by block. Each product is blocked by output columns only,
so that a whole contraction stays in the MXU's accumulators and rounding happens once. The blocks
of both phases of all tiles make one sequence, of which the next is always under way.
"""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.activations import Activation
from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.plan import ExchangePlan
from moe_flax.kernels.fused_ep.rows import LANES, round_up, row_words, word_dtype

STATS = (
    "wi_blocks",
    "wo_blocks",
    "tiles",
    "remote_sends",
    "remote_rows",
    "remote_returns",
    "returned_rows",
)
COLUMNS = 256  # output columns of one product: the width of an MXU


@dataclasses.dataclass(frozen=True)
class FFN:
    """The static side of a kernel.

    Args:
      features: D.
      hidden: F, of this device.
      branches: 2 with a gate, else 1.
      experts: local experts.
      dtype: of the rows and of the products, float32 or bfloat16.
      weight_dtype: as stored.
      activation: the Activation.
      rows: rows of a tile.
      hidden_block: hidden columns of one block of the first product, a multiple of 128.
      feature_block: columns of one block of the second product, in each half of a packed row; it
        divides the row's words.
      wi_window: features that share a scale, 0 where there is none, ``features`` per channel.
      wo_window: hidden columns that share a scale.
      wi_bias: whether the first product has a bias.
      wo_bias: whether the second one has.
    """

    features: int
    hidden: int
    branches: int
    experts: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    activation: Activation
    rows: int
    hidden_block: int
    feature_block: int
    wi_window: int = 0
    wo_window: int = 0
    wi_bias: bool = False
    wo_bias: bool = False

    @property
    def words(self) -> int:
        return row_words(self.features, self.dtype)

    @property
    def halves(self) -> int:
        return 1 if self.dtype.itemsize == 4 else 2

    @property
    def hidden_blocks(self) -> int:
        return -(-self.hidden // self.hidden_block)

    @property
    def feature_blocks(self) -> int:
        return self.words // self.feature_block

    @property
    def wi_scales(self) -> int:
        return -(-self.features // self.wi_window) if self.wi_window else 0

    @property
    def wo_scales(self) -> int:
        return -(-self.hidden // self.wo_window) if self.wo_window else 0

    @property
    def wi_depth(self) -> int:
        """Rows of a block of the first product: D, and zeros up to whole lanes and windows."""
        windows = self.wi_scales * self.wi_window if self.wi_scales > 1 else 0
        return round_up(max(self.features, windows), LANES)

    @property
    def wo_depth(self) -> int:
        windows = self.wo_scales * self.wo_window if self.wo_scales > 1 else 0
        return round_up(max(self.hidden, windows), LANES)

    @property
    def hidden_width(self) -> int:
        """Columns of the hidden rows' buffer."""
        return max(self.hidden_blocks * self.hidden_block, self.wo_depth)

    @property
    def row_variants(self) -> tuple[int, ...]:
        """Tile heights that have code of their own; a tile runs in the least that holds it."""
        return (*tuple(rows for rows in (32, 128, 256) if rows < self.rows), self.rows)


class Weights(tp.NamedTuple):
    """One product's operands; scale and bias are None where the FFN has none."""

    weight: tp.Any
    scale: tp.Any = None
    bias: tp.Any = None


class Scratch(tp.NamedTuple):
    """What the kernel keeps in VMEM, and the semaphores of what comes and goes there."""

    packed: tp.Any  # [2, rows, 1, words]: tiles as they arrive
    features: tp.Any  # [rows, wi_depth]: the tile at work
    gate: tp.Any  # [rows, hidden_block] float32: the activated gate; None where there is none
    hidden: tp.Any  # [rows, hidden_width]
    outputs: tp.Any  # [rows, halves * words] float32: the second product
    results: tp.Any  # [rows, 1, words]: the tile before, on its way out
    wi: Weights  # two blocks each
    wo: Weights
    wi_tail: (
        tp.Any
    )  # columns that fill no whole lanes, [branches, D, rest]; None where there are none
    wo_tail: tp.Any
    packed_sem: tp.Any = None
    wi_sem: tp.Any = None
    wo_sem: tp.Any = None
    results_sem: tp.Any = None
    exchange: tp.Any = None


def vmem_shapes(ffn: FFN) -> Scratch:
    """(shape, dtype) of everything the kernel keeps in VMEM; None where it needs none."""
    f32, out = jnp.dtype(jnp.float32), ffn.halves * ffn.feature_block
    words, weights = word_dtype(ffn.dtype), ffn.weight_dtype
    wi_block = (2, ffn.branches, ffn.wi_depth, ffn.hidden_block)
    wi_rest, wo_rest = ffn.hidden % LANES, ffn.features % LANES

    def operands(block, scales: int, bias: bool):
        *batch, _, columns = block
        return Weights(
            (block, weights),
            ((*batch, scales, columns), f32) if scales else None,
            ((*batch, 1, columns), f32) if bias else None,
        )

    return Scratch(
        packed=((2, ffn.rows, 1, ffn.words), words),
        features=((ffn.rows, ffn.wi_depth), ffn.dtype),
        gate=((ffn.rows, ffn.hidden_block), f32) if ffn.branches == 2 else None,
        hidden=((ffn.rows, ffn.hidden_width), ffn.dtype),
        outputs=((ffn.rows, ffn.halves * ffn.words), f32),
        results=((ffn.rows, 1, ffn.words), words),
        wi=operands(wi_block, ffn.wi_scales, ffn.wi_bias),
        wo=operands((2, ffn.wo_depth, out), ffn.wo_scales, ffn.wo_bias),
        wi_tail=((ffn.branches, ffn.features, wi_rest), weights) if wi_rest else None,
        wo_tail=((ffn.hidden, wo_rest), weights) if wo_rest else None,
    )


def _ffn_scratch(ffn: FFN, exchange: ex.Exchange) -> Scratch:
    dma = pltpu.SemaphoreType.DMA
    buffers = jax.tree.map(
        lambda buffer: pltpu.VMEM(*buffer),
        vmem_shapes(ffn),
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], jnp.dtype),
    )
    return buffers._replace(
        packed_sem=dma((2,)),
        wi_sem=dma((2,)),
        wo_sem=dma((2,)),
        results_sem=dma,
        exchange=ex.semaphores(exchange),
    )


def _column_copies(index, total: int, block: int, whole, part, rest) -> None:
    """Runs the copies of column block ``index`` of ``total`` columns.

    ``whole(start)`` copies a full block, ``part(start, width)`` whole lanes of the last one and
    ``rest(start)`` its columns that fill no whole lanes, which go by a buffer of their own.
    """
    full, left = divmod(total, block)
    lanes = left // LANES * LANES
    if full and whole:
        pl.when(index < full)(lambda: whole(pl.multiple_of(index * block, LANES)))
    if lanes and part:
        pl.when(index == full)(lambda: part(full * block, lanes))
    if left % LANES:
        pl.when(index == full)(lambda: rest(full * block + lanes))


class _Streams:
    """The weight blocks' way into VMEM."""

    def __init__(self, ffn: FFN, wi: Weights, wo: Weights, scratch: Scratch, count):
        self.ffn, self.wi, self.wo, self.scratch, self.count = ffn, wi, wo, scratch, count

    def _run(self, source, target, semaphore, wait: bool) -> None:
        copy = pltpu.make_async_copy(source, target, semaphore)
        copy.wait() if wait else copy.start()

    def first(self, expert, index, slot, *, wait: bool) -> None:
        """Starts, or waits for, block ``index`` of the first product."""
        ffn, buffers = self.ffn, self.scratch.wi
        run = functools.partial(self._run, semaphore=self.scratch.wi_sem.at[slot], wait=wait)
        if not wait:
            self.count("wi_blocks")
        rows = pl.ds(0, ffn.features)
        source = self.wi.weight.at[expert]
        target = buffers.weight.at[slot]

        def part(start, width):
            columns = pl.ds(start, width)
            run(source.at[:, :, columns], target.at[:, rows, pl.ds(0, width)])

        def rest(start):
            run(source.at[:, :, pl.ds(start, ffn.hidden - start)], self.scratch.wi_tail)

        def place(start):  # the columns after these are masked once they are hidden columns
            columns = pl.ds(start % ffn.hidden_block, ffn.hidden - start)
            target[:, rows, columns] = self.scratch.wi_tail[...]

        block = ffn.hidden_block
        whole = functools.partial(part, width=block)
        _column_copies(index, ffn.hidden, block, whole, part, rest)
        self._small(self.wi, buffers, expert, index * block, block, slot, run)
        if wait:  # only now: all that shares the semaphore is here
            _column_copies(index, ffn.hidden, block, None, None, place)

    def second(self, expert, index, slot, *, wait: bool) -> None:
        """Starts, or waits for, block ``index`` of the second product, both halves of the row."""
        ffn, buffers = self.ffn, self.scratch.wo
        run = functools.partial(self._run, semaphore=self.scratch.wo_sem.at[slot], wait=wait)
        if not wait:
            self.count("wo_blocks")
        block, rows = ffn.feature_block, pl.ds(0, ffn.hidden)
        source = self.wo.weight.at[expert]
        target = buffers.weight.at[slot]

        def columns_of(half):
            return min(ffn.features - half * ffn.words, ffn.words)

        def part(start, width, half):
            columns = pl.ds(half * ffn.words + start, width)
            run(source.at[:, columns], target.at[rows, pl.ds(half * block, width)])

        def rest(start):
            start = last * ffn.words + start
            run(source.at[:, pl.ds(start, ffn.features - start)], self.scratch.wo_tail)

        def place(start):
            width = columns_of(last) - start
            target[rows, pl.ds(last * block + start % block, width)] = self.scratch.wo_tail[...]

        last = max(half for half in range(ffn.halves) if columns_of(half) > 0)
        for half in range(last + 1):
            some = functools.partial(part, half=half)
            whole = functools.partial(some, width=block)
            _column_copies(index, columns_of(half), block, whole, some, rest)
        for half in range(ffn.halves):
            start = half * ffn.words + index * block
            self._small(self.wo, buffers, expert, start, block, slot, run, half * block)
        if wait:
            _column_copies(index, columns_of(last), block, None, None, place)

    def _small(self, operands, buffers, expert, start, width, slot, run, to=0) -> None:
        columns = pl.ds(pl.multiple_of(start, LANES), width)
        for source, target in zip(operands[1:], buffers[1:], strict=True):
            if source is not None:
                run(source.at[expert, ..., columns], target.at[slot, ..., pl.ds(to, width)])


def _chunks(width: int) -> list[tuple[int, int]]:
    """(start, width) of the products that cover ``width`` columns."""
    return [(start, min(COLUMNS, width - start)) for start in range(0, width, COLUMNS)]


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
    windowed = scale is not None and scale.shape[0] > 1
    if weight.dtype == dtype and not windowed:
        return weight
    weight = weight.astype(jnp.float32)
    if windowed:
        windows, columns = scale.shape
        depth = windows * window
        scaled = weight[:depth].reshape(windows, window, columns) * scale[:, None, :]
        scaled = scaled.reshape(depth, columns)
        weight = (
            scaled
            if depth == weight.shape[0]
            else jnp.pad(scaled, ((0, weight.shape[0] - depth), (0, 0)))
        )
    return weight.astype(dtype)


def _finish(product, scale, bias):
    """A per-channel scale and the bias, on the float32 product."""
    if scale is not None and scale.shape[0] == 1:
        product = product * scale
    return product if bias is None else product + bias


def _columns(ref, slot, *rest):
    return None if ref is None else ref[(slot, *rest)]


class _Compute:
    """The two phases on one tile of ``rows`` rows.

    Blocks of the first product also pack the results of the tile before: work for the vector
    units that the scheduler has done while the MXUs multiply.
    """

    def __init__(self, ffn: FFN, scratch: Scratch, rows: int):
        self.ffn, self.scratch, self.rows = ffn, scratch, rows

    def first(self, index, slot) -> None:
        ffn, rows, (weight, scale, bias) = self.ffn, self.rows, self.scratch.wi
        chunks = _chunks(ffn.hidden_block)
        pieces = _pieces(index, ffn.hidden_blocks, rows)
        shares = len(chunks) * ffn.branches
        for number, (start, width) in enumerate(chunks):
            columns = pl.ds(start, width)
            hidden = None
            for branch in range(ffn.branches):
                scales = _columns(scale, slot, branch, slice(None), columns)
                loaded = _load(weight[slot, branch, :, columns], scales, ffn.wi_window, ffn.dtype)
                product = _product(self.scratch.features[:rows], loaded, ffn.dtype)
                biases = _columns(bias, slot, branch, slice(None), columns)
                product = _finish(product, scales, biases)
                if ffn.branches == 1:
                    hidden = ffn.activation.activate(product)
                elif branch == 0:
                    self.scratch.gate[:rows, columns] = ffn.activation.activate(product)
                else:
                    gate = self.scratch.gate[:rows, columns]
                    hidden = ffn.activation.multiply(gate, product)
                for piece in pieces[number * ffn.branches + branch :: shares]:
                    pack(ffn, self.scratch, piece)
            first_column = pl.multiple_of(index * ffn.hidden_block + start, LANES)
            if ffn.hidden % ffn.hidden_block:
                column = jax.lax.broadcasted_iota(jnp.int32, hidden.shape, 1) + first_column
                hidden = jnp.where(column < ffn.hidden, hidden, 0)
            self.scratch.hidden[:rows, pl.ds(first_column, width)] = hidden.astype(ffn.dtype)

    def unpack(self, slot) -> None:
        for piece in _pieces(0, 1, self.rows):
            unpack(self.ffn, self.scratch, slot, piece)

    def pack(self) -> None:
        for piece in _pieces(0, 1, self.rows):
            pack(self.ffn, self.scratch, piece)

    def second(self, index, slot) -> None:
        ffn, rows, (weight, scale, bias) = self.ffn, self.rows, self.scratch.wo
        hidden = self.scratch.hidden[:rows, : ffn.wo_depth]
        block = ffn.feature_block

        def columns_of(start, width):
            columns = pl.ds(start, width)
            scales = _columns(scale, slot, slice(None), columns)
            loaded = _load(weight[slot, :, columns], scales, ffn.wo_window, ffn.dtype)
            biases = _columns(bias, slot, slice(None), columns)
            return _finish(_product(hidden, loaded, ffn.dtype), scales, biases)

        def write(half, start, outputs):
            place = half * ffn.words + index * block + start
            place = pl.ds(pl.multiple_of(place, LANES), outputs.shape[1])
            self.scratch.outputs[:rows, place] = outputs

        if ffn.halves == 2 and 2 * block <= COLUMNS:
            both = columns_of(0, 2 * block)
            write(0, 0, both[:, :block])
            write(1, 0, both[:, block:])
            return
        for half in range(ffn.halves):
            for start, width in _chunks(block):
                write(half, start, columns_of(half * block + start, width))


def _pieces(index, blocks: int, rows: int) -> list:
    """The share of block ``index`` of ``blocks`` in some work on all rows, in pieces of 8.

    Where the blocks do not divide the rows the last ones do some again.
    """
    share = round_up(-(-rows // blocks), 16)
    start = 0 if blocks == 1 else pl.multiple_of(jnp.minimum(index * share, rows - share), 16)
    return [pl.ds(start + row, 8) for row in range(0, share, 8)]


def unpack(ffn: FFN, scratch: Scratch, slot, rows) -> None:
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


def pack(ffn: FFN, scratch: Scratch, rows) -> None:
    """Float32 outputs of some rows to packed words."""
    for start, width in _chunks(ffn.words):
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


def _clear_padding(ffn: FFN, scratch: Scratch) -> None:
    """Zeros what no copy ever writes and a product reads: rows of weights past D and past F."""
    for buffer, used, depth in (
        (scratch.wi.weight, ffn.features, ffn.wi_depth),
        (scratch.wo.weight, ffn.hidden, ffn.wo_depth),
    ):
        if used < depth:
            shape = (*buffer.shape[:-2], depth - used, buffer.shape[-1])
            buffer[..., used:, :] = jnp.zeros(shape, buffer.dtype)
    filled = min(ffn.halves * ffn.words, ffn.wi_depth)
    if filled < ffn.wi_depth:
        width = ffn.wi_depth - filled
        scratch.features[:, filled:] = jnp.zeros((ffn.rows, width), ffn.dtype)
    if ffn.hidden_blocks * ffn.hidden_block < ffn.wo_depth:
        start = ffn.hidden_blocks * ffn.hidden_block
        scratch.hidden[:, start:] = jnp.zeros((ffn.rows, ffn.hidden_width - start), ffn.dtype)


def _kernel(
    ffn: FFN,
    exchange: ex.Exchange,
    count_for,
    plan: ExchangePlan,
    rows,
    wi: Weights,
    wo: Weights,
    home_before,
    home,
    received,
    stats,
    scratch: Scratch,
):
    del home_before  # the same memory as home, where it is given
    count = count_for(stats)
    sems = scratch.exchange
    streams = _Streams(ffn, wi, wo, scratch, count)
    first_expert, tiles = plan.totals[0], plan.totals[4]

    @pl.when(tiles > 0)
    def _():
        streams.first(first_expert, 0, 0, wait=False)

    _clear_padding(ffn, scratch)
    ex.enter(exchange)
    ex.send_all(exchange, plan, rows, received, sems, count)

    def tile_copy(expert, row, number, slot):
        place = pl.ds(plan.expert_start[expert] + row, number)
        packed = scratch.packed.at[slot, pl.ds(0, number)]
        return pltpu.make_async_copy(received.at[place], packed, scratch.packed_sem.at[slot])

    def result_copy(expert, row, number):
        place = pl.ds(plan.expert_start[expert] + row, number)
        results = scratch.results.at[pl.ds(0, number)]
        return pltpu.make_async_copy(results, received.at[place], scratch.results_sem)

    def rows_of(expert, row):
        return jnp.minimum(plan.expert_rows[expert] - row, ffn.rows)

    def by_height(number, run):
        low = 0
        for height in ffn.row_variants:
            pl.when((number > low) & (number <= height))(
                functools.partial(run, _Compute(ffn, scratch, height))
            )
            low = height

    def retire(expert, row):
        """The tile's results are in HBM; after an expert's last tile they set out."""
        number = rows_of(expert, row)
        result_copy(expert, row, number).wait()

        @pl.when(row + number == plan.expert_rows[expert])
        def _():
            ex.return_expert(exchange, plan, expert, received, home, sems, count)

    def tile(step, state):
        (expert, row), last, before_last = state
        number = rows_of(expert, row)
        tallest = jnp.maximum(number, rows_of(*last))  # at the first tile both are one
        slot = 1 - step % 2  # of the tile after
        more = row + number < plan.expert_rows[expert]
        following = step + 1 < tiles
        next_expert = jnp.where(more, expert, plan.next_expert[expert])
        next_row = jnp.where(more, row + number, 0)
        count("tiles")

        @pl.when(step > 1)
        def _():
            retire(*before_last)

        @pl.when(following)
        def _():
            @pl.when(next_expert // exchange.arrival_group != expert // exchange.arrival_group)
            def _():
                ex.wait_arrivals(exchange, plan, received, next_expert, sems)

            tile_copy(next_expert, next_row, rows_of(next_expert, next_row), slot).start()

        def first_block(index, carry):
            block = step * ffn.hidden_blocks + index
            now = block % 2

            @pl.when(index + 1 < ffn.hidden_blocks)
            def _():
                streams.first(expert, index + 1, 1 - now, wait=False)

            @pl.when(index + 1 == ffn.hidden_blocks)
            def _():
                streams.second(expert, 0, step * ffn.feature_blocks % 2, wait=False)

            streams.first(expert, index, now, wait=True)
            by_height(tallest, lambda compute: compute.first(index, now))
            return carry

        jax.lax.fori_loop(0, ffn.hidden_blocks, first_block, 0)

        @pl.when(step > 0)
        def _():
            result_copy(*last, rows_of(*last)).start()

        @pl.when(following)
        def _():
            coming = rows_of(next_expert, next_row)
            tile_copy(next_expert, next_row, coming, slot).wait()
            by_height(coming, lambda compute: compute.unpack(slot))

        def second_block(index, carry):
            block = step * ffn.feature_blocks + index
            now = block % 2

            @pl.when(index + 1 < ffn.feature_blocks)
            def _():
                streams.second(expert, index + 1, 1 - now, wait=False)

            @pl.when((index + 1 == ffn.feature_blocks) & following)
            def _():
                streams.first(next_expert, 0, (step + 1) * ffn.hidden_blocks % 2, wait=False)

            streams.second(expert, index, now, wait=True)
            by_height(number, lambda compute: compute.second(index, now))
            return carry

        jax.lax.fori_loop(0, ffn.feature_blocks, second_block, 0)
        return (next_expert, next_row), (expert, row), last

    @pl.when(tiles > 0)
    def _():
        zero = jnp.int32(0)
        start = (first_expert, zero)
        ex.wait_arrivals(exchange, plan, received, first_expert, sems)
        tile_copy(*start, rows_of(*start), 0).start()
        tile_copy(*start, rows_of(*start), 0).wait()
        by_height(rows_of(*start), lambda compute: compute.unpack(0))
        _, last, before_last = jax.lax.fori_loop(0, tiles, tile, (start, start, start))

        @pl.when(tiles > 1)
        def _():
            retire(*before_last)

        by_height(rows_of(*last), lambda compute: compute.pack())
        result_copy(*last, rows_of(*last)).start()
        retire(*last)

    ex.drain_sends(plan, rows, sems)
    ex.drain_returns(plan, received, home, sems)
    ex.leave(exchange, sems)


def _counter(stats):
    for index in range(len(STATS)):
        stats[index] = 0

    def count(name, amount=1):
        stats[STATS.index(name)] += amount

    return count


def fused_ffn(
    ffn: FFN,
    exchange: ex.Exchange,
    plan: ExchangePlan,
    rows: jax.Array,
    wi: Weights,
    wo: Weights,
    *,
    capacity: int,
    home: jax.Array | None = None,
    vmem_limit_bytes: int | None = None,
    interpret: tp.Any = False,
    traffic: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """One pass of the fused FFN on one device, inside ``shard_map`` over the expert axis.

    Args:
      ffn: sizes and blocks.
      exchange: the expert axis.
      plan: the pass's copies.
      rows: [N, 1, words], packed rows sorted by expert.
      wi: [L, branches, D, F] with scale [L, branches, windows, columns] and bias
        [L, branches, 1, columns], columns being F filled up to whole blocks.
      wo: [L, F, D] with scale [L, windows, columns] and bias [L, 1, columns], columns being the
        features that a packed row has room for.
      capacity: rows of the receive buffer.
      home: [N, 1, words] results of earlier passes, written over; None in a single pass, which
        leaves rows without an expert as memory was.
      vmem_limit_bytes: given to the compiler.
      interpret: as for ``pallas_call``.
      traffic: count the copies started.

    Returns:
      [N, 1, words], the experts' outputs in the order of ``rows``; and the counts, int32 in the
      order of ``STATS``, or None.
    """
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    arrays = (plan, rows, wi, wo, home)
    specs = (
        ex.plan_specs(),
        hbm,
        *(jax.tree.map(lambda _: hbm, operands) for operands in (wi, wo, home)),
    )
    row = rows.shape[1:]
    out = [
        ex.like(rows, rows.shape),
        ex.like(rows, (capacity, *row)),
        ex.like(rows, (len(STATS),), jnp.int32) if traffic else None,
    ]
    results = pl.pallas_call(
        functools.partial(_kernel, ffn, exchange, _counter if traffic else lambda _: ex.no_count),
        out_shape=out,
        in_specs=specs,
        out_specs=[hbm, hbm, smem if traffic else None],
        scratch_shapes=[_ffn_scratch(ffn, exchange)],
        input_output_aliases={} if home is None else {len(jax.tree.leaves(arrays)) - 1: 0},
        compiler_params=ex.compiler_params(exchange, vmem_limit_bytes),
        interpret=interpret,
        name="moe_fused_ffn",
    )(*arrays)
    return results[0], results[2]

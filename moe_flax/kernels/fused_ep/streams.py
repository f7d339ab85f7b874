"""The weight blocks' way from HBM into VMEM."""

import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.rows import LANES
from moe_flax.kernels.fused_ep.scratch import Scratch, Weights


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


class Streams:
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

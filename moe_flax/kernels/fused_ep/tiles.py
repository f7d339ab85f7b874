"""The row tiles of one device's experts, one after another, each in the shadow of the next."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.compute import Compute
from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.plan import ExchangePlan
from moe_flax.kernels.fused_ep.scratch import Scratch
from moe_flax.kernels.fused_ep.streams import Streams


class Tile(tp.NamedTuple):
    """Rows of a local expert from ``row`` on, as many as a tile holds."""

    expert: tp.Any
    row: tp.Any


class TileLoop:
    """All tiles of a pass.

    While a tile is computed the rows and the weights of the next arrive, and the results of the
    one before leave; an expert's rows set out for home two steps after its last tile was begun.
    """

    def __init__(
        self,
        ffn: FFN,
        exchange: ex.Exchange,
        plan: ExchangePlan,
        streams: Streams,
        received,
        home,
        scratch: Scratch,
        count: ex.Count,
    ):
        self.ffn, self.exchange, self.plan, self.streams = ffn, exchange, plan, streams
        self.received, self.home, self.scratch, self.count = received, home, scratch, count
        self.first_expert, self.tiles = plan.first_expert, plan.tiles

    def prefetch(self) -> None:
        """Starts the first weight block, which waits for no row."""
        self.streams.first(self.first_expert, 0, 0, wait=False)

    def run(self) -> None:
        """Computes all tiles, of which there is at least one, and sends them home."""
        start = Tile(self.first_expert, jnp.int32(0))
        ex.wait_arrivals(
            self.exchange, self.plan, self.received, start.expert, self.scratch.exchange
        )
        self._tile_copy(start, self._rows(start), 0).start()
        self._tile_copy(start, self._rows(start), 0).wait()
        self._by_height(self._rows(start), lambda compute: compute.unpack(0))
        state = jax.lax.fori_loop(0, self.tiles, self._step, (start, start, start))
        _, last, before_last = state

        @pl.when(self.tiles > 1)
        def _():
            self._retire(before_last)

        self._by_height(self._rows(last), lambda compute: compute.pack())
        self._result_copy(last, self._rows(last)).start()
        self._retire(last)

    def _step(self, step, state):
        tile, last, before_last = state
        number = self._rows(tile)
        tallest = jnp.maximum(number, self._rows(last))  # at the first tile both are one
        slot = 1 - step % 2  # of the tile after
        more = tile.row + number < self.plan.expert_rows[tile.expert]
        following = step + 1 < self.tiles
        coming = Tile(
            jnp.where(more, tile.expert, self.plan.next_expert[tile.expert]),
            jnp.where(more, tile.row + number, 0),
        )
        self.count("tiles")

        @pl.when(step > 1)
        def _():
            self._retire(before_last)

        @pl.when(following)
        def _():
            self._fetch(coming, tile, slot)

        self._first_product(step, tile, tallest)

        @pl.when(step > 0)
        def _():
            self._result_copy(last, self._rows(last)).start()

        @pl.when(following)
        def _():
            rows = self._rows(coming)
            self._tile_copy(coming, rows, slot).wait()
            self._by_height(rows, lambda compute: compute.unpack(slot))

        self._second_product(step, tile, number, coming.expert, following)
        return coming, tile, last

    def _first_product(self, step, tile: Tile, rows) -> None:
        """All blocks, each while the next is on its way; after the last the second product's."""
        ffn, streams = self.ffn, self.streams

        def block(index, carry):
            slot = (step * ffn.hidden_blocks + index) % 2

            @pl.when(index + 1 < ffn.hidden_blocks)
            def _():
                streams.first(tile.expert, index + 1, 1 - slot, wait=False)

            @pl.when(index + 1 == ffn.hidden_blocks)
            def _():
                streams.second(tile.expert, 0, step * ffn.feature_blocks % 2, wait=False)

            streams.first(tile.expert, index, slot, wait=True)
            self._by_height(rows, lambda compute: compute.first(index, slot))
            return carry

        jax.lax.fori_loop(0, ffn.hidden_blocks, block, 0)

    def _second_product(self, step, tile: Tile, rows, next_expert, following) -> None:
        """The same for the second product; after its last block the next tile's first one."""
        ffn, streams = self.ffn, self.streams

        def block(index, carry):
            slot = (step * ffn.feature_blocks + index) % 2

            @pl.when(index + 1 < ffn.feature_blocks)
            def _():
                streams.second(tile.expert, index + 1, 1 - slot, wait=False)

            @pl.when((index + 1 == ffn.feature_blocks) & following)
            def _():
                streams.first(next_expert, 0, (step + 1) * ffn.hidden_blocks % 2, wait=False)

            streams.second(tile.expert, index, slot, wait=True)
            self._by_height(rows, lambda compute: compute.second(index, slot))
            return carry

        jax.lax.fori_loop(0, ffn.feature_blocks, block, 0)

    def _fetch(self, coming: Tile, tile: Tile, slot) -> None:
        """Starts the copy of the tile after this one, once its expert's rows are here."""
        group = self.exchange.arrival_group

        @pl.when(coming.expert // group != tile.expert // group)
        def _():
            ex.wait_arrivals(
                self.exchange, self.plan, self.received, coming.expert, self.scratch.exchange
            )

        self._tile_copy(coming, self._rows(coming), slot).start()

    def _retire(self, tile: Tile) -> None:
        """The tile's results are in HBM; after an expert's last tile they set out."""
        number = self._rows(tile)
        self._result_copy(tile, number).wait()

        @pl.when(tile.row + number == self.plan.expert_rows[tile.expert])
        def _():
            ex.return_expert(
                self.exchange,
                self.plan,
                tile.expert,
                self.received,
                self.home,
                self.scratch.exchange,
                self.count,
            )

    def _rows(self, tile: Tile):
        return jnp.minimum(self.plan.expert_rows[tile.expert] - tile.row, self.ffn.rows)

    def _tile_copy(self, tile: Tile, number, slot):
        place = pl.ds(self.plan.expert_start[tile.expert] + tile.row, number)
        packed = self.scratch.packed.at[slot, pl.ds(0, number)]
        return pltpu.make_async_copy(
            self.received.at[place], packed, self.scratch.packed_sem.at[slot]
        )

    def _result_copy(self, tile: Tile, number):
        """Results take the place of the rows that they came from."""
        place = pl.ds(self.plan.expert_start[tile.expert] + tile.row, number)
        results = self.scratch.results.at[pl.ds(0, number)]
        return pltpu.make_async_copy(results, self.received.at[place], self.scratch.results_sem)

    def _by_height(self, number, run: tp.Callable[[Compute], None]) -> None:
        """Runs the code of the least tile height that holds ``number`` rows."""
        low = 0
        for height in self.ffn.row_variants:
            compute = Compute(self.ffn, self.scratch, height)
            pl.when((number > low) & (number <= height))(functools.partial(run, compute))
            low = height

"""Who sends which rows where: every offset of the exchange, from one table of counts.

Each device holds its T*K rows sorted by expert. Rows for one expert are then one block a source,
and an expert's device keeps the blocks of its experts one after another, experts first, sources
second. Prefix sums of the [P, E] table of counts give both sides of every copy, so no row carries
a header and the way back is the way there, reversed.
"""

import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class ExchangePlan(tp.NamedTuple):
    """One device's copies in one pass; all int32, rows counted from the start of each buffer.

    Arrays outside a kernel, refs to scalar memory inside.

    Attributes:
      send_rows: [E] rows that this device sends to each expert.
      send_from: [E] their place among its own sorted rows.
      send_to: [E] their place in the receive buffer of the expert's device.
      return_rows: [L * P] rows that local expert l gives back to source p, at l * P + p.
      return_from: [L * P] their place in this device's receive buffer.
      return_to: [L * P] their place among the source's sorted rows.
      expert_rows: [L] rows of each local expert in this pass.
      expert_start: [L] where they start in the receive buffer.
      next_expert: [L] the next local expert with rows, L where there is none.
      totals: [5] first local expert with rows, rows sent to other devices, rows returned to
        other devices, rows that come home, row tiles.
    """

    send_rows: tp.Any
    send_from: tp.Any
    send_to: tp.Any
    return_rows: tp.Any
    return_from: tp.Any
    return_to: tp.Any
    expert_rows: tp.Any
    expert_start: tp.Any
    next_expert: tp.Any
    totals: tp.Any

    @property
    def first_expert(self):
        return self.totals[0]

    @property
    def sent_rows(self):
        return self.totals[1]

    @property
    def returned_rows(self):
        return self.totals[2]

    @property
    def home_rows(self):
        return self.totals[3]

    @property
    def tiles(self):
        return self.totals[4]


def exclusive_cumsum(x: jax.Array, axis: int) -> jax.Array:
    """Sums of what lies before each element on ``axis``."""
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def most_received(counts: Int[Array, "P E"]) -> Int[Array, ""]:
    """The rows that the busiest device receives."""
    sources = counts.shape[0]
    return jnp.max(jnp.sum(counts.reshape(sources, sources, -1), axis=(0, 2), dtype=jnp.int32))


def exchange_plan(
    counts: Int[Array, "P E"],
    device: Int[Array, ""],
    *,
    tile_rows: int,
    window_start: int | Int[Array, ""] = 0,
    capacity: int,
) -> ExchangePlan:
    """The copies of one device in one pass.

    A pass takes the rows whose place among all the rows an expert device receives lies in
    ``[window_start, window_start + capacity)``; consecutive windows make up the exchange whatever
    the routing is, and only an expert that a window's edge cuts is computed in two passes.

    Args:
      counts: rows that each source has for each expert.
      device: this device's index on the expert axis.
      tile_rows: rows that one row tile of the FFN holds.
      window_start: first row of the pass.
      capacity: rows of the receive buffer.

    Returns:
      The ExchangePlan of ``device``.
    """
    sources, experts = counts.shape
    local = experts // sources
    counts = counts.astype(jnp.int32)
    own_offset = exclusive_cumsum(counts, 1)
    expert_total = jnp.sum(counts, axis=0, dtype=jnp.int32).reshape(sources, local)
    expert_base = exclusive_cumsum(expert_total, 1).reshape(experts)
    position = expert_base[None, :] + exclusive_cumsum(counts, 0)
    low = jnp.clip(position - window_start, 0, capacity)
    high = jnp.clip(position + counts - window_start, 0, capacity)
    rows = high - low
    home = own_offset + jnp.clip(window_start - position, 0, counts)

    def mine(table):  # [P, E] -> this device's experts, [L, P]
        return jax.lax.dynamic_slice_in_dim(table, device * local, local, axis=1).T

    own_rows = jnp.take(rows, device, axis=0)
    return_rows = mine(rows)
    expert_rows = jnp.sum(return_rows, axis=1, dtype=jnp.int32)
    index = jnp.where(expert_rows > 0, jnp.arange(local, dtype=jnp.int32), local)
    at_or_after = jax.lax.cummin(index, reverse=True)
    next_expert = jnp.concatenate([at_or_after[1:], jnp.full((1,), local, jnp.int32)])
    to_self = jnp.sum(jnp.take(return_rows, device, axis=1), dtype=jnp.int32)
    home_rows = jnp.sum(own_rows, dtype=jnp.int32)
    totals = jnp.stack(
        [
            at_or_after[0],
            home_rows - to_self,
            jnp.sum(expert_rows, dtype=jnp.int32) - to_self,
            home_rows,
            jnp.sum((expert_rows + tile_rows - 1) // tile_rows, dtype=jnp.int32),
        ]
    )
    return ExchangePlan(
        send_rows=own_rows,
        send_from=jnp.take(home, device, axis=0),
        send_to=jnp.take(low, device, axis=0),
        return_rows=return_rows.reshape(-1),
        return_from=mine(low).reshape(-1),
        return_to=mine(home).reshape(-1),
        expert_rows=expert_rows,
        expert_start=exclusive_cumsum(expert_rows, 0),
        next_expert=next_expert,
        totals=totals,
    )

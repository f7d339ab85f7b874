"""A row travels only to the devices that hold its experts, once to each, and one row returns.

An ordinary dense all-to-all over buffers of a stated number of rows a peer. A batch more skewed
than the buffers hold takes the all-gather strategy instead, decided on the devices at run time
and by all of them alike, so nothing is ever dropped.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_flax.parallel.all_gather import all_gather
from moe_flax.parallel.common import ExpertWeights, FeedForward, local_routing
from moe_flax.routing import Routing

SLACK = 1.5  # buffer rows over the rows of an even load


def all_to_all(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    *,
    axes: tuple[str, ...],
    slack: float = SLACK,
) -> Float[Array, "t D"]:
    """A strategy, see `parallel.common.Strategy`. Rows a device receives: P * `buffer_rows`."""
    peers = jax.lax.axis_size(axes)
    num_tokens, k = routing.expert_ids.shape
    capacity = buffer_rows(num_tokens, k, peers, slack)
    count = weights.wi.shape[0]
    device = jnp.where(routing.expert_ids >= 0, routing.expert_ids // count, peers)
    hits = jnp.any(device[:, :, None] == jnp.arange(peers), axis=1)
    exchange = functools.partial(_exchange, feed_forward, axes=axes, capacity=capacity)
    if capacity == num_tokens:
        return exchange(tokens, routing, weights, device, hits)
    fullest = jnp.max(jnp.sum(hits, axis=0))
    everyone = tuple(jax.typeof(fullest).manual_axis_type.varying)
    fits = jax.lax.pmax(fullest, everyone) <= capacity
    return jax.lax.cond(
        fits,
        exchange,
        lambda tokens, routing, weights, *_: all_gather(
            feed_forward, tokens, routing, weights, axes=axes
        ),
        *(tokens, routing, weights, device, hits),
    )


def buffer_rows(num_tokens: int, k: int, peers: int, slack: float = SLACK) -> int:
    """Rows a buffer holds for one peer: ``slack`` times an even load, at most all tokens."""
    distinct = peers * (1 - (1 - 1 / peers) ** k)  # devices a token's K experts lie on
    even = num_tokens * distinct / peers
    return min(num_tokens, 8 * math.ceil(slack * even / 8))


def _exchange(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    device: Int[Array, "t K"],
    hits: Array,
    *,
    axes: tuple[str, ...],
    capacity: int,
) -> Float[Array, "t D"]:
    num_tokens, peers = hits.shape
    count = weights.wi.shape[0]
    rows = peers * capacity
    # Where token t's row for peer p lies in the buffer; `rows` where there is none.
    position = jnp.arange(peers) * capacity + jnp.cumsum(hits, axis=0) - 1
    position = jnp.where(hits, position, rows)
    source = (
        jnp.full(rows, num_tokens)
        .at[position.ravel()]
        .set(jnp.repeat(jnp.arange(num_tokens), peers), mode="drop")
    )
    # The K slots of a token share a row where they share a device: the first of them takes it.
    earlier = (device[:, :, None] == device[:, None, :]) & np.tri(device.shape[1], k=-1, dtype=bool)
    alone = ~jnp.any(earlier, axis=-1) & (device < peers)
    slots = jnp.take_along_axis(position, jnp.minimum(device, peers - 1), axis=1)
    slots = jnp.where(alone, slots, rows)

    def travel(x: jax.Array) -> jax.Array:
        split = x.reshape(peers, capacity, *x.shape[1:])
        return jax.lax.all_to_all(split, axes, 0, 0).reshape(x.shape)

    ids = routing.expert_ids.at[source].get(mode="fill", fill_value=peers * count)
    slot_weights = routing.weights.at[source].get(mode="fill", fill_value=0.0)
    received = Routing(travel(ids), travel(slot_weights), apply_to=routing.apply_to)
    here = local_routing(received, jax.lax.axis_index(axes) * count, count)
    served = feed_forward(travel(_scatter_rows(tokens, source, slots)), here, weights)
    return _gather_rows(travel(served), source, slots)


# Rows to buffer slots and back are each other's transpose: both gradients are gathers.


@jax.custom_vjp
def _scatter_rows(
    tokens: Float[Array, "t D"], source: Int[Array, " rows"], slots: Int[Array, "t K"]
) -> Float[Array, "rows D"]:
    """Row r of the buffer is token ``source[r]``; zeros past the last token."""
    return tokens.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _gather_rows(
    buffer: Float[Array, "rows D"], source: Int[Array, " rows"], slots: Int[Array, "t K"]
) -> Float[Array, "t D"]:
    """Token t is the float32 sum over k of buffer rows ``slots[t, k]``, in the order of k."""
    total = jnp.zeros((), jnp.float32)
    for k in range(slots.shape[1]):
        row = buffer.at[slots[:, k]].get(mode="fill", fill_value=0)
        total = total + row.astype(jnp.float32)
    return total.astype(buffer.dtype)


_scatter_rows.defvjp(
    lambda tokens, source, slots: (_scatter_rows(tokens, source, slots), (source, slots)),
    lambda residual, grad: (_gather_rows(grad, *residual), None, None),
)
_gather_rows.defvjp(
    lambda buffer, source, slots: (_gather_rows(buffer, source, slots), (source, slots)),
    lambda residual, grad: (_scatter_rows(grad, *residual), None, None),
)

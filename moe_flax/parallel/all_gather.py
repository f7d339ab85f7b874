"""Every device sees all tokens, serves those of its experts, and the parts are summed home."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_flax.parallel.common import ExpertWeights, FeedForward, local_routing
from moe_flax.routing import Routing


def all_gather(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    *,
    axes: tuple[str, ...],
) -> Float[Array, "t D"]:
    """A strategy, see `parallel.common.Strategy`. Rows a device receives: (P - 1) * t, each way.

    The sum over devices runs in float32.
    """
    count = weights.wi.shape[0]
    tokens_all, ids, slot_weights = jax.tree.map(
        lambda x: jax.lax.all_gather(x, axes, axis=0, tiled=True),
        (tokens, routing.expert_ids, routing.weights),
    )
    everywhere = Routing(ids, slot_weights, apply_to=routing.apply_to)
    here = local_routing(everywhere, jax.lax.axis_index(axes) * count, count)
    parts = feed_forward(tokens_all, here, weights).astype(jnp.float32)
    return jax.lax.psum_scatter(parts, axes, scatter_dimension=0, tiled=True).astype(tokens.dtype)


def replicated(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    *,
    axes: tuple[str, ...],
) -> Float[Array, "t D"]:
    """The same where the devices of ``axes`` hold the same tokens already: one sum, no gather."""
    count = weights.wi.shape[0]
    here = local_routing(routing, jax.lax.axis_index(axes) * count, count)
    parts = feed_forward(tokens, here, weights).astype(jnp.float32)
    return jax.lax.psum(parts, axes).astype(tokens.dtype)

"""No token travels: every device gathers all experts' weights and serves its own tokens."""

import jax
from jaxtyping import Array, Float

from moe_flax.parallel.common import ExpertWeights, FeedForward
from moe_flax.routing import Routing


def none(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    *,
    axes: tuple[str, ...],
) -> Float[Array, "t D"]:
    """A strategy, see `parallel.common.Strategy`. Bytes a device receives: all other weights."""
    if axes:
        weights = jax.tree.map(lambda w: jax.lax.all_gather(w, axes, axis=0, tiled=True), weights)
    return feed_forward(tokens, routing, weights)

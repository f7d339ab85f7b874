"""What the strategies share: their signature, and local expert numbers."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe_flax.routing import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The experts a device holds: [E_local, J, D, F] and [E_local, F, D], biases optional.

    Quantised ones have scales, and may lie transposed; all of them begin with E_local.
    """

    wi: Shaped[Array, "E J D F"]
    wo: Shaped[Array, "E F D"]
    wi_bias: Float[Array, "E J F"] | None = None
    wo_bias: Float[Array, "E D"] | None = None
    wi_scale: Shaped[Array, "E ..."] | None = None
    wo_scale: Shaped[Array, "E ..."] | None = None


class FeedForward(tp.Protocol):
    """The expert FFN on one device; ids count the experts in ``weights``."""

    def __call__(
        self, tokens: Float[Array, "t D"], routing: Routing, weights: ExpertWeights
    ) -> Float[Array, "t D"]: ...


class Strategy(tp.Protocol):
    """How rows travel to the devices that hold their experts, and back.

    Called on each device, inside ``shard_map``. ``tokens`` and ``routing`` are the device's own,
    ids count all experts; ``weights`` are those of its E / P experts, in order of ``axes``.
    """

    def __call__(
        self,
        feed_forward: FeedForward,
        tokens: Float[Array, "t D"],
        routing: Routing,
        weights: ExpertWeights,
        *,
        axes: tuple[str, ...],
    ) -> Float[Array, "t D"]: ...


def local_routing(routing: Routing, first: Array | int, count: int) -> Routing:
    """Renumbers experts ``first .. first + count - 1`` to ``0 .. count - 1``; others get ``count``.

    A token can go to at most ``count`` experts here, so no more slots than that are kept.
    """
    local = routing.expert_ids - first
    here = (local >= 0) & (local < count)
    ids = jnp.where(here, local, count)
    weights = jnp.where(here, routing.weights, 0.0)
    if count < ids.shape[-1]:
        order = jnp.argsort(~here, axis=-1, stable=True)[:, :count]
        ids = jnp.take_along_axis(ids, order, axis=-1)
        weights = jnp.take_along_axis(weights, order, axis=-1)
    return Routing(ids, weights, apply_to=routing.apply_to)

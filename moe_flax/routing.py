"""Logits to `Routing`: which experts a token goes to, and with what weight."""

import dataclasses
import typing as tp

import jax
from jaxtyping import Array, Float, Int

from moe_flax.config import RouterConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes: the only thing that passes from routing to the experts.

    A slot whose id is E or more has no expert: it was dropped for want of capacity, pads the
    batch, or belongs to an identity expert. Experts skip it; its weight is never used there.

    Attributes:
      expert_ids: [T, K] int32; within a token no id below E occurs twice.
      weights: [T, K] float32.
      probabilities: [T, E] float32, each expert's score before the choice (losses use it), or None.
      apply_to: weights multiply the experts' "output" or "input".
    """

    expert_ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    probabilities: Float[Array, "T E"] | None = None
    apply_to: tp.Literal["output", "input"] = dataclasses.field(
        default="output", metadata={"static": True}
    )


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    num_experts_per_token: int,
    *,
    correction_bias: Float[Array, " E"] | None = None,
    per_expert_scale: Float[Array, " E"] | None = None,
) -> Routing:
    """To be written."""
    raise NotImplementedError

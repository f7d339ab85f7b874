"""`fused_ep_moe` for callers that hold router logits: softmax, top-k, and the kernel."""

import typing as tp

from jaxtyping import Array, Float, Shaped

from moe_flax.config import RouterConfig
from moe_flax.kernels.fused_ep.api import fused_ep_moe
from moe_flax.routing import route


def fused_ep_moe_from_logits(
    tokens: Float[Array, "T D"],
    wi: Shaped[Array, "E J D F"],
    wo: Shaped[Array, "E F D"],
    logits: Float[Array, "T E"],
    num_experts_per_token: int,
    *,
    renormalize: bool = False,
    mesh: tp.Any,
    **options: tp.Any,
) -> Float[Array, "T D"]:
    """Each token goes to the K experts of its highest softmax scores, the weights being these.

    `moe_flax.route` has any other router; this is one of its settings and `fused_ep_moe` in one
    call. Differentiable in the logits besides.

    Args:
      tokens: [T, D].
      wi: [E, J, D, F].
      wo: [E, F, D].
      logits: [T, E], of any float dtype; the softmax is over all E, in float32.
      num_experts_per_token: K.
      renormalize: divide the K weights of a token by their sum.
      mesh: as for `fused_ep_moe`.
      **options: all other keywords of `fused_ep_moe`.

    Returns:
      [T, D] in the dtype of tokens.

    Raises:
      ValueError: logits that are not [T, E], or what `moe_flax.route` and `fused_ep_moe` refuse.
      TypeError: dtypes that are not allowed.
    """
    expected = (*tokens.shape[:1], *wi.shape[:1])
    if logits.shape != expected:
        raise ValueError(
            f"logits must have shape [T, E] = {expected}, got {logits.shape} (tokens"
            f" {tokens.shape}, wi {wi.shape})"
        )
    router = RouterConfig(score="softmax", renormalize=renormalize)
    routing = route(logits, router, num_experts_per_token)
    return fused_ep_moe(tokens, wi, wo, routing, mesh=mesh, **options)

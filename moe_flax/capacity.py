"""Expert capacity: what happens where experts take only so many tokens (Switch, GShard, NLLB)."""

import dataclasses
import math
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_flax.config import RouterConfig
from moe_flax.routing import Routing


def expert_capacity(
    num_tokens: int, num_experts: int, num_experts_per_token: int, capacity_factor: float
) -> int:
    """Tokens one expert takes: ``ceil(capacity_factor * T * K / E)``."""
    return math.ceil(capacity_factor * num_tokens * num_experts_per_token / num_experts)


def tokens_an_expert_takes(
    router: RouterConfig, num_tokens: int, num_experts: int, num_experts_per_token: int
) -> int | None:
    """The capacity that a router's configuration gives; None where no token can exceed it.

    Args:
      router: its configuration.
      num_tokens: T, tokens of the batch or of a sequence, as ``router.capacity_scope`` has it.
      num_experts: E.
      num_experts_per_token: K.
    """
    capacity = router.expert_capacity
    if router.capacity_factor is not None:
        capacity = expert_capacity(
            num_tokens, num_experts, num_experts_per_token, router.capacity_factor
        )
    elif router.capacity_fraction is not None:
        capacity = math.ceil(router.capacity_fraction * num_tokens)
    return None if capacity is None or capacity >= num_tokens else capacity


def apply_capacity(
    routing: Routing,
    num_experts: int,
    capacity: int,
    *,
    num_identity_experts: int = 0,
    priority: tp.Literal["slot", "token", "weight"] = "slot",
    renormalize: bool = False,
    importance: Float[Array, " T"] | None = None,
) -> Routing:
    """Drops what exceeds an expert's capacity.

    A dropped slot gets the id ``num_experts + num_identity_experts`` and weight 0. Identity
    experts have no limit.

    Args:
      routing: of T tokens, [T, K].
      num_experts: E.
      capacity: slots an expert takes, see ``expert_capacity``.
      num_identity_experts: Z.
      priority: who comes first. "slot": first choices of all tokens in order, then second choices
        (Switch, GShard, NLLB); "token": all choices of a token before the next token's; "weight":
        as "slot", tokens with the largest weight first (V-MoE's batch priority).
      renormalize: divide the weights that are left of a token by their sum (NLLB's default).
      importance: what "weight" goes by instead of a token's largest weight, [T].

    Returns:
      Routing; ``probabilities`` are unchanged.

    Raises:
      ValueError: ``priority`` is not known or ``capacity`` is negative.
    """
    if priority not in ("slot", "token", "weight"):
        raise ValueError(f"priority must be 'slot', 'token' or 'weight', got {priority!r}")
    if capacity < 0:
        raise ValueError(f"capacity must be >= 0, got {capacity}")
    ids, weights = routing.expert_ids, routing.weights
    if priority == "weight":
        first = weights.max(axis=-1) if importance is None else importance
        turn = jnp.argsort(-jax.lax.stop_gradient(first), stable=True)
        position = jnp.zeros_like(ids).at[turn].set(_positions(ids[turn].T).T)
    else:
        position = _positions(ids) if priority == "token" else _positions(ids.T).T
    kept = (position < capacity) | (ids >= num_experts)
    weights = jnp.where(kept, weights, 0.0)
    if renormalize:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
    ids = jnp.where(kept, ids, num_experts + num_identity_experts)
    return dataclasses.replace(routing, expert_ids=ids, weights=weights)


def _positions(ids: Int[Array, "A B"]) -> Int[Array, "A B"]:
    """How many equal ids come before each, in row-major order."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    first = jnp.searchsorted(ordered, ordered, side="left").astype(jnp.int32)
    rank = jnp.arange(flat.size, dtype=jnp.int32) - first
    return jnp.zeros_like(rank).at[order].set(rank, unique_indices=True).reshape(ids.shape)

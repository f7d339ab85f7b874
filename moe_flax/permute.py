"""Token rows sorted by expert and back; every gradient is a gather, as every function is.

A slot is one of a token's K choices: slot ``t * K + k``. Sorting is stable, so each expert sees
its tokens in order, and slots without an expert come last.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MAX_SLOTS = 2**31 - 1  # slots are int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Permutation:
    """Slots in the order of their experts.

    Attributes:
      order: [T * K] int32, the slot at each sorted position.
      inverse: [T, K] int32, the sorted position of each slot.
      group_sizes: [E] int32, slots of each expert; the first ``sum(group_sizes)`` positions are
        these, in order, and the rest have no expert.
    """

    order: Int[Array, " TK"]
    inverse: Int[Array, "T K"]
    group_sizes: Int[Array, " E"]

    @property
    def has_expert(self) -> Bool[Array, "T K"]:
        """Whether each slot has an expert."""
        return self.inverse < jnp.sum(self.group_sizes)

    @property
    def occupied(self) -> Bool[Array, " TK"]:
        """Whether each sorted position has an expert."""
        return jnp.arange(self.order.shape[0], dtype=jnp.int32) < jnp.sum(self.group_sizes)

    @property
    def experts(self) -> Int[Array, " TK"]:
        """The expert of each sorted position; E - 1 where there is none."""
        positions = jnp.arange(self.order.shape[0], dtype=jnp.int32)
        experts = jnp.searchsorted(jnp.cumsum(self.group_sizes), positions, side="right")
        return jnp.minimum(experts, self.group_sizes.shape[0] - 1).astype(jnp.int32)


def sort_by_expert(expert_ids: Int[Array, "T K"], num_experts: int) -> Permutation:
    """Sorts slots by expert, stably.

    Args:
      expert_ids: [T, K]; ids outside [0, num_experts) stand for no expert.
      num_experts: E.

    Raises:
      TypeError: ids of another than an integer dtype.
      ValueError: ids that are not [T, K], or 2**31 slots or more.
    """
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids must have an integer dtype, got {expert_ids.dtype}")
    if expert_ids.ndim != 2:
        raise ValueError(f"expert_ids must be [T, K], got shape {expert_ids.shape}")
    if expert_ids.size > _MAX_SLOTS:
        raise ValueError(
            f"sort_by_expert takes up to 2**31 - 1 slots, got shape {expert_ids.shape}:"
            " split the tokens"
        )
    inside = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = jnp.where(inside, expert_ids.astype(jnp.int32), num_experts).reshape(-1)
    slots = jax.lax.iota(jnp.int32, ids.size)
    sorted_ids, order = jax.lax.sort((ids, slots), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(slots, unique_indices=True)
    bounds = jnp.searchsorted(sorted_ids, jnp.arange(num_experts + 1, dtype=jnp.int32))
    return Permutation(order, inverse.reshape(expert_ids.shape), jnp.diff(bounds).astype(jnp.int32))


@jax.custom_vjp
def gather_rows(tokens: Float[Array, "T D"], permutation: Permutation) -> Float[Array, "TK D"]:
    """Copies each token to its sorted positions; positions without an expert are 0.

    The gradient sums each token's K rows in float32, in the order of k.
    """
    num_tokens, k = permutation.inverse.shape
    if num_tokens == 0:
        return jnp.zeros_like(tokens, shape=(0, tokens.shape[1]))
    rows = tokens.at[permutation.order // k].get(mode="promise_in_bounds")
    return jnp.where(permutation.occupied[:, None], rows, 0)


def _gather_rows_forward(tokens, permutation):
    return gather_rows(tokens, permutation), (permutation, jnp.zeros_like(tokens, shape=()))


def _gather_rows_backward(residuals, grad):
    permutation, like = residuals
    return _sum_slots(grad, permutation, None).astype(like.dtype), None


gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@jax.custom_vjp
def gather_slots(values: Float[Array, "T K"], permutation: Permutation) -> Float[Array, " TK"]:
    """Sorts one value a slot; positions without an expert are 0."""
    picked = values.reshape(-1).at[permutation.order].get(mode="promise_in_bounds")
    return jnp.where(permutation.occupied, picked, 0)


def _gather_slots_forward(values, permutation):
    return gather_slots(values, permutation), permutation


def _gather_slots_backward(permutation, grad):
    picked = grad.at[permutation.inverse].get(mode="promise_in_bounds")
    return jnp.where(permutation.has_expert, picked, 0), None


gather_slots.defvjp(_gather_slots_forward, _gather_slots_backward)


@jax.custom_vjp
def combine_rows(
    rows: Float[Array, "TK D"], weights: Float[Array, "T K"] | None, permutation: Permutation
) -> Float[Array, "T D"]:
    """Sums each token's K rows, weighted, in float32 and in the order of k.

    Slots without an expert add nothing, whatever their rows and weights hold.

    Args:
      rows: [T * K, D] in sorted order.
      weights: [T, K], or None for 1.
      permutation: of `sort_by_expert`.

    Returns:
      [T, D] float32 (float64 for float64 rows).
    """
    return _sum_slots(rows, permutation, weights)


def _combine_rows_forward(rows, weights, permutation):
    return combine_rows(rows, weights, permutation), (rows, weights, permutation)


def _combine_rows_backward(residuals, grad):
    rows, weights, permutation = residuals
    rows_grad = gather_rows(grad, permutation)
    if weights is None:
        return rows_grad.astype(rows.dtype), None, None
    rows_grad = rows_grad * gather_slots(weights, permutation)[:, None]
    products = [
        jnp.sum(row.astype(grad.dtype) * grad, axis=-1)
        for _, row in _rows_of_choices(rows, permutation)
    ]
    weights_grad = jnp.stack(products, axis=-1)
    weights_grad = jnp.where(permutation.has_expert, weights_grad, 0)
    return rows_grad.astype(rows.dtype), weights_grad.astype(weights.dtype), None


combine_rows.defvjp(_combine_rows_forward, _combine_rows_backward)


def _sum_slots(rows, permutation, weights) -> jax.Array:
    """Adds up each token's rows, one k after another: no [T, K, D] is made."""
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros_like(rows, shape=(permutation.inverse.shape[0], rows.shape[1]), dtype=dtype)
    for k, row in _rows_of_choices(rows, permutation):
        row = row.astype(dtype)
        row = row if weights is None else row * weights[:, k, None].astype(dtype)
        total = total + jnp.where(permutation.has_expert[:, k, None], row, 0)
    return total


def _rows_of_choices(rows, permutation):
    """Yields k and each token's row of its choice k, [T, D]."""
    for k in range(permutation.inverse.shape[1]):
        yield k, rows.at[permutation.inverse[:, k]].get(mode="promise_in_bounds")

"""The whole routed half on a GPU: sort, two products, combine, and one gradient rule for all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch
from moe_flax.kernels.grouped_matmul.triton.combine import combine
from moe_flax.kernels.grouped_matmul.triton.sorting import sort_by_expert


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed when the FFN is traced: the activation and the tiles of each product."""

    activation: Activation
    up: configs.Tiles
    down: configs.Tiles
    grad_hidden: configs.Tiles
    grad_tokens: configs.Tiles
    grad_weights: configs.Tiles


def make_call(activation: Activation, tokens, wi, ids) -> Call:
    """Chooses the tiles for tokens [T, D], wi [E, J, D, F] and ids [T, K]."""
    chip, rows, groups = launch.chip(), ids.size, wi.shape[0]
    size = tokens.dtype.itemsize
    pair = configs.product_tiles(chip, rows, groups, size, wi.shape[1])
    one = configs.product_tiles(chip, rows, groups, size, 1)
    return Call(activation, pair, one, one, one, configs.contraction_tiles(chip, size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_ffn(call: Call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    """y[t] = sum_k weights[t, k] * ffn of expert ids[t, k] on tokens[t], k in order, in float32.

    Args:
      call: the fixed part.
      tokens: [T, D].
      wi: [E, J, D, F], J is 2 (gate, up) or 1; wo: [E, F, D]; all of the tokens' dtype.
      wi_bias: [E, J, F] or None; wo_bias: [E, D] or None.
      ids: [T, K] int32; ids outside [0, E) are skipped.
      weights: [T, K] float32.

    Returns:
      [T, D] in the tokens' dtype.
    """
    return _run(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights, False)[0]


def _run(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights, keep):
    rows, top_k = ids.size, ids.shape[1]
    order = sort_by_expert(ids, weights, wi.shape[0], call.up.rows)
    hidden = calls.product(
        tokens, wi, order.plan, rows, tiles=call.up, gather=order.row_token, bias=wi_bias,
        activation=call.activation, store_pre=keep,
    )  # fmt: skip
    hidden, pre = hidden if keep else (hidden, None)
    bias = None if wo_bias is None else wo_bias[:, None]
    values = calls.product(hidden, wo[:, None], order.plan, rows, tiles=call.down, bias=bias)
    y = combine(values.reshape(rows, -1), weights, order.slot_row, top_k)
    return y, (pre, order)


def _forward(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    y, (pre, order) = _run(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights, True)
    plan = order.plan
    return y, (tokens, wi, wo, wi_bias, wo_bias, ids, pre, tuple(order[:3]), plan.table)


def _backward(call, kept, grad):
    tokens, wi, wo, wi_bias, wo_bias, ids, pre, (row_token, row_weight, slot_row), table = kept
    rows, top_k = ids.size, ids.shape[1]
    experts = wi.shape[0]
    plan = calls.Plan(table, experts, (table.shape[0] - 2 - experts) // 2, call.up.rows)
    grad = grad.astype(tokens.dtype)
    d_pre, weighted, dots = calls.product(
        grad, wo[:, None], plan, rows, tiles=call.grad_hidden, transposed=True, gather=row_token,
        activation=call.activation, pre=pre, row_scale=row_weight,
    )  # fmt: skip
    d_wo = calls.contraction(
        weighted, grad, plan, tiles=call.grad_weights, grad_gather=row_token, out_dtype=wo.dtype
    )
    d_wi = calls.contraction(
        tokens, d_pre, plan, tiles=call.grad_weights, lhs_gather=row_token, out_dtype=wi.dtype
    )
    d_rows = calls.product(d_pre, wi, plan, rows, tiles=call.grad_tokens, transposed=True)
    d_tokens = combine(d_rows.reshape(rows, -1), None, slot_row, top_k)
    placed = slot_row >= 0
    d_weights = jnp.where(placed, jnp.sum(dots, 0)[jnp.maximum(slot_row, 0)], 0.0).reshape(ids.shape)
    d_wi_bias = d_wo_bias = None
    if wi_bias is not None:
        flat = d_pre.reshape(rows, -1)
        d_wi_bias = calls.group_sum(flat, plan, wi_bias.dtype).reshape(wi_bias.shape)
    if wo_bias is not None:
        d_wo_bias = calls.group_sum(grad, plan, wo_bias.dtype, gather=row_token, scale=row_weight)
        by_expert = jnp.einsum("td,ed->te", grad, wo_bias, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(by_expert, jnp.clip(ids, 0, experts - 1), 1)
        d_weights += jnp.where(placed.reshape(ids.shape), chosen, 0.0)
    return d_tokens, d_wi, d_wo, d_wi_bias, d_wo_bias, None, d_weights


routed_ffn.defvjp(_forward, _backward)

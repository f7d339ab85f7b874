"""The whole routed half on a GPU: sort, two products, combine, and one gradient rule for all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.batching import one_by_one
from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch
from moe_flax.kernels.grouped_matmul.triton.combine import combine, gather
from moe_flax.kernels.grouped_matmul.triton.pointwise import activate_rows, activate_rows_grad
from moe_flax.kernels.grouped_matmul.triton.sorting import Plan, plan_capacity, sort_by_expert


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed when the FFN is traced.

    Attributes:
      activation: between the products.
      up: tiles of the first product fused with the activation; all products share its rows.
      precision: of float32 products, as `calls.dot_precision` returns it.
      gather_first: copy the rows to their sorted places ahead of the fused first product.
      plain_up, down, grad_hidden, grad_tokens: tiles of the plain products.
      grad_wi, grad_wo: tiles of the contractions.
      transposed: wi is [E, J, F, D] and wo [E, D, F].
    """

    activation: Activation
    precision: str
    up: configs.Tiles
    gather_first: bool
    plain_up: configs.Tiles
    down: configs.Tiles
    grad_hidden: configs.Tiles
    grad_tokens: configs.Tiles
    grad_wi: configs.Tiles
    grad_wo: configs.Tiles
    transposed: bool = False


def make_call(
    activation: Activation, tokens, wi, ids, precision: str | None = None, transposed: bool = False
) -> Call:
    """Chooses the tiles for tokens [T, D], wi [E, J, D, F] or transposed, and ids [T, K]."""
    chip, rows = launch.chip(), ids.size
    experts, branches = wi.shape[:2]
    features, hidden = wi.shape[:1:-1] if transposed else wi.shape[2:]
    size = tokens.dtype.itemsize
    height = None

    def choose(kind, k, n, branches=1):
        shape = configs.Shape(kind, rows, experts, k, n, size, branches)
        return configs.choose(chip, shape, height)

    up, gather_first = choose("fused", features, hidden, branches)
    height = up.rows  # all products walk the same tiles of rows
    widen, _ = choose("product", features, hidden, branches)
    narrow, _ = choose("product", hidden, features)
    hidden_back, _ = choose("transposed", features, hidden)
    back, _ = choose("summed", hidden, features, branches)
    by_wi, _ = choose("contraction", features, hidden, branches)
    by_wo, _ = choose("contraction", hidden, features)
    if transposed:  # the Hopper kernel has no transposed pair, nor a summed product of others
        plain = configs.Tiles(128, 256, 64, 8, 4)
        up = dataclasses.replace(plain, columns=256 // branches) if up.specialised else up
        back = plain if back.specialised else back
    return Call(
        activation, precision or calls.dot_precision(), up, gather_first, widen, narrow,
        hidden_back, back, by_wi, by_wo, transposed,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_ffn(call: Call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    """y[t] = sum_k weights[t, k] * ffn of expert ids[t, k] on tokens[t], k in order, in float32.

    The gradient keeps the tokens, the pre-activation and the sorted order, nothing else that is as
    long as the rows. ``jax.vmap`` runs the batch one after another.

    Args:
      call: the fixed part.
      tokens: [T, D].
      wi: [E, J, D, F], J is 2 (gate, up) or 1; wo: [E, F, D]; all of the tokens' dtype. Transposed
        where the call says so.
      wi_bias: [E, J, F] or None; wo_bias: [E, D] or None.
      ids: [T, K] int32; ids outside [0, E) are skipped.
      weights: [T, K] float32.

    Returns:
      [T, D] in the tokens' dtype.
    """
    run = one_by_one(functools.partial(_infer, call))
    return run(tokens, wi, wo, wi_bias, wo_bias, ids, weights)


def _infer(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    order = sort_by_expert(ids, weights, wi.shape[0], call.up.rows)
    index, rows = order.row_token, tokens
    if call.gather_first:
        rows, index = gather(tokens, order.row_token), None
    hidden = calls.product(
        rows, wi, order.plan, ids.size, tiles=call.up, gather=index, bias=wi_bias,
        transposed=call.transposed, activation=call.activation, precision=call.precision,
    )  # fmt: skip
    return _down(call, hidden, wo, wo_bias, order, weights)


def _down(call, hidden, wo, wo_bias, order, weights):
    bias = None if wo_bias is None else wo_bias[:, None]
    rows = hidden.shape[0]
    values = calls.product(
        hidden, wo[:, None], order.plan, rows, tiles=call.down, transposed=call.transposed,
        bias=bias, precision=call.precision,
    )  # fmt: skip
    return combine(values.reshape(rows, -1), weights, order.slot_row, weights.shape[1])


def _forward(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    run = one_by_one(functools.partial(_train, call))
    y, *kept = run(tokens, wi, wo, wi_bias, wo_bias, ids, weights)
    return y, (tokens, wi, wo, wi_bias, wo_bias, ids, *kept)


def _train(call, tokens, wi, wo, wi_bias, wo_bias, ids, weights):
    order = sort_by_expert(ids, weights, wi.shape[0], call.up.rows)
    rows = gather(tokens, order.row_token)
    pre = calls.product(
        rows, wi, order.plan, ids.size, tiles=call.plain_up, transposed=call.transposed,
        bias=wi_bias, precision=call.precision,
    )  # fmt: skip
    hidden = activate_rows(pre, call.activation)
    y = _down(call, hidden, wo, wo_bias, order, weights)
    sort = (order.row_token, order.row_weight, order.slot_row, order.plan.table)
    return y, pre, sort


def _backward(call, kept, grad):
    d_tokens, d_wi, d_wo, d_wi_bias, d_wo_bias, d_weights = one_by_one(
        functools.partial(_gradients, call)
    )(*kept, grad)
    return d_tokens, d_wi, d_wo, d_wi_bias, d_wo_bias, None, d_weights


def _gradients(call, tokens, wi, wo, wi_bias, wo_bias, ids, pre, sort, grad):
    row_token, row_weight, slot_row, table = sort
    rows, top_k = ids.shape[0] * ids.shape[1], ids.shape[1]
    experts = wi.shape[0]
    plan = Plan(table, experts, plan_capacity(rows, experts, call.up.rows), call.up.rows)
    grad = grad.astype(tokens.dtype)
    grad_rows = gather(grad, row_token)
    d_hidden = calls.product(
        grad_rows,
        wo[:, None],
        plan,
        rows,
        tiles=call.grad_hidden,
        transposed=not call.transposed,
        precision=call.precision,
    )
    d_pre, weighted, dots = activate_rows_grad(
        d_hidden.reshape(rows, -1), pre, row_weight, call.activation
    )

    def by_weights(first, second, tiles, dtype):
        first, second = (second, first) if call.transposed else (first, second)
        return calls.contraction(
            first, second, plan, tiles=tiles, out_dtype=dtype, precision=call.precision
        )

    d_wo = by_weights(weighted, grad_rows, call.grad_wo, wo.dtype)
    d_wi = by_weights(gather(tokens, row_token), d_pre, call.grad_wi, wi.dtype).reshape(wi.shape)
    d_rows = calls.product(
        d_pre, wi, plan, rows, tiles=call.grad_tokens, transposed=not call.transposed,
        precision=call.precision,
    )  # fmt: skip
    d_tokens = combine(d_rows.reshape(rows, -1), None, slot_row, top_k)
    placed = slot_row >= 0
    d_weights = jnp.where(placed, dots[jnp.maximum(slot_row, 0)], 0.0).reshape(ids.shape)
    d_wi_bias = d_wo_bias = None
    if wi_bias is not None:
        flat = d_pre.reshape(rows, -1)
        d_wi_bias = calls.group_sum(flat, plan, wi_bias.dtype).reshape(wi_bias.shape)
    if wo_bias is not None:
        d_wo_bias = calls.group_sum(grad_rows, plan, wo_bias.dtype, scale=row_weight)
        by_expert = jnp.einsum(
            "td,ed->te", grad, wo_bias, preferred_element_type=jnp.float32, precision="highest"
        )
        chosen = jnp.take_along_axis(by_expert, jnp.clip(ids, 0, experts - 1), 1)
        d_weights += jnp.where(placed.reshape(ids.shape), chosen, 0.0)
    return d_tokens, d_wi, d_wo, d_wi_bias, d_wo_bias, d_weights


routed_ffn.defvjp(_forward, _backward)

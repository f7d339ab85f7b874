"""The routed half with float8 rows and matrices: quantise, two products, combine; forward only."""

import dataclasses

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch
from moe_flax.kernels.grouped_matmul.triton.combine import combine
from moe_flax.kernels.grouped_matmul.triton.quantizing import quantize_rows
from moe_flax.kernels.grouped_matmul.triton.sorting import sort_by_expert


@dataclasses.dataclass(frozen=True)
class Float8Call:
    """What is fixed when the FFN is traced.

    Attributes:
      activation: between the products.
      scale_ub: the largest magnitude that a row's scale allows for, or None.
      fused: the first product applies the activation; else it is quantised and applied in one pass.
      up, down: tiles of the products; both have the same rows.
    """

    activation: Activation
    scale_ub: float | None
    fused: bool
    up: configs.Tiles
    down: configs.Tiles


def make_call(activation: Activation, scale_ub: float | None, wi, ids) -> Float8Call:
    """Chooses the tiles for wi [E, J, F, D] and ids [T, K]."""
    experts, branches, hidden, features = wi.shape
    chip, rows = launch.chip(), ids.size
    up = configs.float8_tiles(chip, rows, experts, features, hidden, branches)
    down = configs.float8_tiles(chip, rows, experts, hidden, features)
    return Float8Call(activation, scale_ub, True, up, down)


def routed_ffn(
    call: Float8Call, tokens, wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights
):
    """y[t] = sum_k weights[t, k] * ffn of expert ids[t, k] on tokens[t], k in order, in float32.

    Args:
      call: the fixed part.
      tokens: [T, D] bfloat16, float16 or float32.
      wi: [E, J, F, D] float8_e4m3fn, J is 2 (gate, up) or 1; wo: [E, D, F] alike.
      wi_scale: [E, J, F, 1] float32; wo_scale: [E, D, 1].
      wi_bias: [E, J, F] or None; wo_bias: [E, D] or None.
      ids: [T, K] int32; ids outside [0, E) are skipped.
      weights: [T, K] float32.

    Returns:
      [T, D] in the tokens' dtype.
    """
    count, dtype = ids.size, tokens.dtype
    order = sort_by_expert(ids, weights, wi.shape[0], call.up.rows)
    places = order.slot_row.reshape(ids.shape)
    rows, row_scale = quantize_rows(tokens, scale_ub=call.scale_ub, places=places)
    hidden = calls.product(
        rows, wi, order.plan, count, tiles=call.up, transposed=True, out_dtype=dtype, bias=wi_bias,
        scales=(row_scale, wi_scale), activation=call.activation if call.fused else None,
    )  # fmt: skip
    later = None if call.fused else call.activation
    hidden, hidden_scale = quantize_rows(hidden, scale_ub=call.scale_ub, activation=later)
    values = calls.product(
        hidden, wo[:, None], order.plan, count, tiles=call.down, transposed=True, out_dtype=dtype,
        bias=None if wo_bias is None else wo_bias[:, None],
        scales=(hidden_scale, wo_scale),
    )  # fmt: skip
    return combine(values.reshape(count, -1), weights, order.slot_row, ids.shape[1])


def expert_ffn(
    tokens, wi, wo, routing, *, activation, wi_bias, wo_bias, wi_scale, wo_scale, scale_ub
) -> jax.Array:
    """The operands of `moe_flax.experts_float8.float8_ffn`, made those of `routed_ffn`."""
    if 0 in (tokens.size, wi.size):
        return jnp.zeros_like(tokens)
    dtype = tokens.dtype if tokens.dtype != jnp.float64 else jnp.float32
    rows, ids = tokens.astype(dtype), routing.expert_ids.astype(jnp.int32)
    weights = routing.weights.astype(jnp.float32)
    top_k = ids.shape[1]
    if routing.apply_to == "input":
        placed = (ids >= 0) & (ids < wi.shape[0])
        scaled = rows[:, None].astype(jnp.float32) * weights[:, :, None]
        rows = jnp.where(placed[:, :, None], scaled, 0).reshape(-1, tokens.shape[1]).astype(dtype)
        ids, weights = ids.reshape(-1, 1), jnp.ones((ids.size, 1), jnp.float32)
    call = make_call(activation, scale_ub, wi, ids)
    scales = [scale.astype(jnp.float32) for scale in (wi_scale, wo_scale)]
    biases = [None if b is None else b.astype(jnp.float32) for b in (wi_bias, wo_bias)]
    y = routed_ffn(call, rows, wi, wo, scales[0], scales[1], biases[0], biases[1], ids, weights)
    if routing.apply_to == "input":
        y = y.reshape(-1, top_k, tokens.shape[1]).astype(jnp.float32).sum(1)
    return y.astype(tokens.dtype)

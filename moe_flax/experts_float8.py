"""The expert FFN with float8 activations and weights, one scale a row of either: forward only."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.batching import one_by_one
from moe_flax.kernels.grouped_matmul.api import grouped_matmul, load_backend
from moe_flax.permute import combine_rows, gather_rows, gather_slots, sort_by_expert
from moe_flax.quantize import quantize_rows
from moe_flax.routing import Routing


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is fixed when the FFN is traced."""

    activation: Activation
    scale_ub: float | None
    apply_to: tp.Literal["output", "input"]
    precision: str | jax.lax.Precision | None
    backend: str


def float8_ffn(
    tokens, wi, wo, routing, *, activation, wi_bias, wo_bias, wi_scale, wo_scale, scale_ub,
    precision, backend,
) -> jax.Array:  # fmt: skip
    """`moe_flax.expert_ffn` of checked operands with ``act_qtype=float8_e4m3fn``.

    Token rows are quantised, multiplied, activated in float32, rounded to the tokens' dtype,
    quantised and multiplied again.
    """
    call = _Call(activation, scale_ub, routing.apply_to, precision, backend)
    return _forward_only(
        call, tokens, wi, wo, routing.expert_ids, routing.weights, wi_bias, wo_bias, wi_scale,
        wo_scale,
    )  # fmt: skip


def check_float8(wi, wo, wi_scale, wo_scale, transpose_weights: bool, act_qtype, scale_ub) -> None:
    """Raises where weights are not those that float8 activations multiply."""
    if act_qtype is None:
        if scale_ub is not None:
            raise ValueError("scale_ub bounds the scales of float8 activations: give act_qtype too")
        return
    if jnp.dtype(act_qtype) != jnp.float8_e4m3fn:
        raise TypeError(f"act_qtype must be None or float8_e4m3fn, got {jnp.dtype(act_qtype)}")
    if scale_ub is not None and not (isinstance(scale_ub, int | float) and scale_ub > 0):
        raise ValueError(f"scale_ub must be None or a number above 0, got {scale_ub!r}")
    for name, matrix, scale in (("wi", wi, wi_scale), ("wo", wo, wo_scale)):
        wanted = (*matrix.shape[:-1], 1)
        given = None if scale is None else scale.shape
        if matrix.dtype != jnp.float8_e4m3fn or given != wanted or not transpose_weights:
            raise ValueError(
                f"act_qtype=float8_e4m3fn needs transpose_weights=True and {name} in float8_e4m3fn"
                f" with {name}_scale {wanted}, one a row, as moe_flax.quantize.quantize_rows makes"
                f" them; got {matrix.dtype}, scales {given}, transpose_weights={transpose_weights}"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_only(call, tokens, wi, wo, ids, weights, wi_bias, wo_bias, wi_scale, wo_scale):
    own = getattr(load_backend(call.backend), "expert_ffn_float8", None)
    run = own or functools.partial(
        sorted_float8_ffn, precision=call.precision, backend=call.backend
    )

    def apply(tokens, wi, wo, ids, weights, wi_bias, wo_bias, wi_scale, wo_scale):
        return run(
            tokens, wi, wo, Routing(ids, weights, apply_to=call.apply_to),
            activation=call.activation, wi_bias=wi_bias, wo_bias=wo_bias, wi_scale=wi_scale,
            wo_scale=wo_scale, scale_ub=call.scale_ub,
        )  # fmt: skip

    operands = (tokens, wi, wo, ids, weights, wi_bias, wo_bias, wi_scale, wo_scale)
    return one_by_one(apply)(*operands)


def _refuse(*_):
    raise TypeError(
        "expert_ffn with act_qtype has no gradient: float8 activations are for inference;"
        " differentiate with act_qtype=None"
    )


_forward_only.defvjp(_refuse, _refuse)


def sorted_float8_ffn(
    tokens, wi, wo, routing, *, activation, wi_bias, wo_bias, wi_scale, wo_scale, scale_ub,
    precision, backend,
) -> jax.Array:  # fmt: skip
    """Sort, two grouped products of quantised rows, combine: for backends without their own."""
    permutation = sort_by_expert(routing.expert_ids, wi.shape[0])

    def product(rows, scale, matrices, matrix_scale, bias):
        out = grouped_matmul(
            rows, matrices, permutation.group_sizes, transpose_rhs=True, lhs_scale=scale,
            rhs_scale=matrix_scale, preferred_element_type=jnp.float32, precision=precision,
            backend=backend,
        )  # fmt: skip
        return out if bias is None else out + bias.astype(jnp.float32)[permutation.experts]

    if routing.apply_to == "input":
        rows = gather_rows(tokens, permutation).astype(jnp.float32)
        rows = rows * gather_slots(routing.weights, permutation)[:, None]
        rows, scale = quantize_rows(rows, scale_ub=scale_ub)
    else:
        values, scales = quantize_rows(tokens, scale_ub=scale_ub)
        rows, scale = gather_rows(values, permutation), gather_rows(scales, permutation)
    hidden = activation(product(rows, scale, wi, wi_scale, wi_bias)).astype(tokens.dtype)
    rows, scale = quantize_rows(hidden, scale_ub=scale_ub)
    rows = product(rows, scale, wo, wo_scale, wo_bias).astype(tokens.dtype)
    weights = None if routing.apply_to == "input" else routing.weights
    return combine_rows(rows, weights, permutation).astype(tokens.dtype)

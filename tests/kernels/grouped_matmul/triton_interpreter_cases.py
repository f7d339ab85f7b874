"""Prints the routed FFN's errors in Triton's interpreter; a process of its own, as Triton asks."""

import json
import sys

import jax
import jax.numpy as jnp
import triton_interpreter

import moe_flax
from moe_flax import quantize
from moe_flax.activations import resolve_activation
from moe_flax.experts import expert_ffn_reference
from moe_flax.kernels.grouped_matmul.triton import ffn, ffn_kept, launch

# T, E, K, D, F, activation, branches, biases
CASES = {
    "gated": (16, 4, 2, 24, 33, "silu", 2, True),
    "clamped": (12, 4, 3, 20, 40, "gpt_oss", 2, True),
    "no gate": (16, 4, 1, 24, 33, "relu2", 1, False),
    "batched": (10, 4, 2, 24, 33, "silu", 2, True),
}
BATCH = 3  # of tokens and routings, the experts being the same


def errors(case: tuple, batch: tuple[int, ...]) -> list[float]:
    """Relative errors of the output and every gradient; with a batch, by `jax.vmap`."""
    tokens, experts, top_k, features, hidden, name, branches, biases = case
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x, cotangent = normal(*batch, tokens, features), normal(*batch, tokens, features)
    wi = normal(experts, branches, features, hidden) / features**0.5
    wo = normal(experts, hidden, features) / hidden**0.5
    wi_bias = normal(experts, branches, hidden) if biases else None
    wo_bias = normal(experts, features) if biases else None
    scores, ids = jax.lax.top_k(normal(*batch, tokens, experts), top_k)
    ids = ids.at[..., 0, 0].set(experts)
    activation = resolve_activation(name)

    def ours(x, wi, wo, wi_bias, wo_bias, weights, ids):
        with launch.compile_for(80):
            call = ffn.make_call(activation, x, wi, ids)
            return ffn.routed_ffn(call, x, wi, wo, wi_bias, wo_bias, ids, weights)

    def wanted(x, wi, wo, wi_bias, wo_bias, weights, ids):
        return expert_ffn_reference(
            x, wi, wo, moe_flax.Routing(ids, weights), activation=activation, wi_bias=wi_bias,
            wo_bias=wo_bias,
        )  # fmt: skip

    leaves = []
    for function in (ours, wanted):
        if batch:
            function = jax.vmap(function, in_axes=(0, None, None, None, None, 0, 0))
        with launch.compile_for(80), jax.default_matmul_precision("highest"):
            floats = (x, wi, wo, wi_bias, wo_bias, jax.nn.softmax(scores))
            y, pull = jax.vjp(lambda *floats: function(*floats, ids), *floats)  # noqa: B023
            leaves.append(jax.tree.leaves((y, pull(cotangent))))
    return [
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(*leaves, strict=True)
    ]


# T, E, K, D, F, activation, branches, biases, the function that quantises
KEPT = {
    "kept int8": (16, 4, 2, 40, 72, "silu", 2, True, quantize.quantize_channels),
    "kept blocks": (16, 4, 2, 264, 136, "gpt_oss", 2, True, quantize.quantize_blocks),
    "kept no gate": (12, 4, 1, 40, 136, "relu2", 1, False, quantize.quantize_blocks),
}


def kept_errors(case: tuple) -> list[float]:
    """The same of quantised weights, in float16: the output, and gradients by all but them."""
    tokens, experts, top_k, features, hidden, name, branches, biases, make = case
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x = normal(tokens, features).astype(jnp.float16)
    wi, wi_scale = make(normal(experts, branches, hidden, features) / features**0.5)
    wo, wo_scale = make(normal(experts, features, hidden) / hidden**0.5)
    wi_bias = normal(experts, branches, hidden) if biases else None
    wo_bias = normal(experts, features) if biases else None
    scores, ids = jax.lax.top_k(normal(tokens, experts), top_k)
    ids = ids.at[0, 0].set(experts)
    activation = resolve_activation(name)

    def ours(x, wi_scale, wo_scale, wi_bias, wo_bias, weights):
        call = ffn_kept.make_call(activation, x, wi, wo, wi_scale, wo_scale, ids)
        operands = (wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights)
        return ffn_kept.routed_ffn(call, x, *operands)

    def wanted(x, wi_scale, wo_scale, wi_bias, wo_bias, weights):
        return expert_ffn_reference(
            x, wi, wo, moe_flax.Routing(ids, weights), activation=activation, wi_bias=wi_bias,
            wo_bias=wo_bias, wi_scale=wi_scale, wo_scale=wo_scale, transpose_weights=True,
        )  # fmt: skip

    floats = (x, wi_scale, wo_scale, wi_bias, wo_bias, jax.nn.softmax(scores))
    leaves = []
    for function in (ours, wanted):
        with launch.compile_for(80):
            y, pull = jax.vjp(function, *floats)
            leaves.append(jax.tree.leaves((y, pull(y))))
    return [
        float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
        for a, b in zip(*leaves, strict=True)
    ]


if __name__ == "__main__":
    launch.call = triton_interpreter.call
    name = sys.argv[1]
    if name in KEPT:
        print(json.dumps(kept_errors(KEPT[name])))
    else:
        print(json.dumps(errors(CASES[name], (BATCH,) if name == "batched" else ())))

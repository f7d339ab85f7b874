"""Prints the kernels' errors in Triton's interpreter; a process of its own, as Triton asks."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton_interpreter

import moe_flax
from moe_flax import quantize
from moe_flax.activations import resolve_activation
from moe_flax.experts import expert_ffn_reference
from moe_flax.experts_float8 import sorted_float8_ffn
from moe_flax.kernels.grouped_matmul.triton import (
    ffn,
    ffn_float8,
    ffn_kept,
    launch,
    quantizing,
    sorting,
)
from moe_flax.quantize import quantize_rows

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


def float8_errors() -> list[float]:
    """Of the float8 layer against its emulation, and of quantised rows (elements that differ)."""
    experts, features, hidden = 4, 32, 48
    keys = iter(jax.random.split(jax.random.key(0), 9))
    x = jax.random.normal(next(keys), (16, features)).at[1].set(0).at[2].multiply(100)
    wi, wi_scale = quantize_rows(jax.random.normal(next(keys), (experts, 2, hidden, features)) / 6)
    wo, wo_scale = quantize_rows(jax.random.normal(next(keys), (experts, features, hidden)) / 6)
    scores, ids = jax.lax.top_k(jax.random.normal(next(keys), (16, experts)), 2)
    routing = moe_flax.Routing(ids.at[0, 0].set(experts), jax.nn.softmax(scores))
    options = {
        "activation": resolve_activation("gpt_oss"),
        "wi_bias": jax.random.normal(next(keys), wi.shape[:-1]),
        "wo_bias": jax.random.normal(next(keys), wo.shape[:-1]),
        "wi_scale": wi_scale,
        "wo_scale": wo_scale,
        "scale_ub": 3.0,
    }
    with launch.compile_for(89):  # the first that has float8 and no descriptors
        y = ffn_float8.expert_ffn(x, wi, wo, routing, **options)
    wanted = sorted_float8_ffn(
        x, wi, wo, routing, precision="highest", backend="reference", **options
    )
    errors = [float(jnp.linalg.norm(y - wanted) / jnp.linalg.norm(wanted))]

    x = x.at[3, 1].set(jnp.nan)
    for quantizing._WIDEST in (8, 64):  # in several passes, and in one
        for bound in (None, 3.0):
            values, scales = quantizing.quantize_rows(x, scale_ub=bound)
            others, wanted = quantize_rows(x, scale_ub=bound)
            a, b = values.astype(jnp.float32), others.astype(jnp.float32)
            errors.append(float(jnp.sum((a != b) & ~(jnp.isnan(a) & jnp.isnan(b)))))
            apart = jnp.abs(scales / wanted[:, 0] - 1)
            errors.append(float(jnp.max(jnp.where(jnp.isnan(wanted[:, 0]), 0, apart))))
            errors.append(float(jnp.sum(jnp.isnan(scales) != jnp.isnan(wanted[:, 0]))))
    return errors


def sorting_errors() -> list[float]:
    """How many entries of the sorted order and of its plan differ from numpy's, a case each."""
    cases = (  # T, K, E, rows a tile, the most experts that get tokens
        (16, 8, 128, 16, 128),
        (100, 3, 5, 16, 5),
        (250, 8, 128, 32, 128),
        (700, 8, 60, 128, 60),
        (700, 8, 60, 128, 1),
        (2100, 2, 8, 64, 3),
        (9000, 4, 16, 128, 16),
        (1, 1, 1, 16, 1),
    )
    errors = []
    for tokens, top_k, experts, block_rows, used in cases:
        rng = np.random.default_rng(tokens + used)
        ids = rng.integers(-1, used + 1, (tokens, top_k)).astype(np.int32)
        ids[ids >= used] = experts  # no expert, as -1
        weights = rng.normal(size=ids.shape).astype(np.float32)
        found = sorting.sort_by_expert(jnp.asarray(ids), jnp.asarray(weights), experts, block_rows)
        flat = np.where((ids < 0) | (ids >= experts), experts, ids).ravel()
        order = np.argsort(flat, kind="stable")
        sizes = np.bincount(flat, minlength=experts)[:experts]
        placed = sizes.sum()
        slot_row = np.full(flat.size, -1)
        slot_row[order[:placed]] = np.arange(placed)
        wrong = (np.asarray(found.slot_row) != slot_row).sum()
        wrong += (np.asarray(found.row_token) != order // top_k).sum()
        row_weight = np.where(np.arange(flat.size) < placed, weights.ravel()[order], 0)
        wrong += (np.asarray(found.row_weight) != row_weight).sum()
        errors.append(float(wrong + plan_errors(found.plan, sizes)))

        short = rng.multinomial(tokens // 2, np.ones(experts) / experts).astype(np.int32)
        plan = sorting.make_plan(jnp.asarray(short), tokens, block_rows, tail=True)
        errors.append(float(plan_errors(plan, np.append(short, tokens - short.sum()))))
    return errors


def plan_errors(plan: sorting.Plan, sizes: np.ndarray) -> int:
    """Entries that differ; `sizes` may have one more than the groups, of the rows past them."""
    ends = np.cumsum(sizes)
    tiles = [
        (group, row)
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for row in range(end - size, end, plan.block_rows)
    ]
    table = np.asarray(plan.table)
    groups = plan.num_groups
    count = len(tiles)
    wrong = int(count != table[0]) + int(plan.capacity < count)
    starts = np.append(0, ends)[: groups + 1]
    wrong += int(np.count_nonzero(table[1 : 2 + groups] - starts))
    lists = table[2 + groups :].reshape(2, plan.capacity)[:, :count]
    return wrong + int(np.count_nonzero(lists.T - np.array(tiles).reshape(-1, 2)))


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
    if name == "float8":
        print(json.dumps(float8_errors()))
    elif name == "sorting":
        print(json.dumps(sorting_errors()))
    elif name in KEPT:
        print(json.dumps(kept_errors(KEPT[name])))
    else:
        print(json.dumps(errors(CASES[name], (BATCH,) if name == "batched" else ())))

"""The Triton kernels on an NVIDIA GPU: the shared base, and the FFN with its own gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_grids import PublishedLayers
from grouped_matmul_base import GroupedMatmulBase, distance
from grouped_matmul_grids import PublishedGrids

import moe_flax
from moe_flax.experts import expert_ffn, expert_ffn_reference
from moe_flax.kernels.grouped_matmul import grouped_matmul

pytestmark = pytest.mark.gpu
NAMES = ("tokens", "wi", "wo", "weights", "wi_bias", "wo_bias")
# T, E, K, D, F, activation, branches, biases, dtype, apply_to
CASES = {
    "hopper kernel, short groups": (250, 4, 2, 512, 768, "silu", 2, True, "bfloat16", "output"),
    "hopper kernel, half tiles": (300, 4, 2, 576, 520, "gpt_oss", 2, True, "bfloat16", "output"),
    "long groups": (1200, 4, 2, 512, 1024, "silu", 2, False, "bfloat16", "output"),
    "no gate": (1200, 4, 2, 256, 520, "relu2", 1, True, "bfloat16", "output"),
    "one row a group": (16, 64, 2, 264, 320, "silu", 2, False, "bfloat16", "output"),
    "odd widths": (40, 4, 3, 257, 451, "gelu", 2, True, "bfloat16", "output"),
    "input weights": (90, 4, 1, 128, 192, "silu", 2, True, "bfloat16", "input"),
    "float16": (300, 4, 2, 264, 320, "gelu_tanh", 2, False, "float16", "output"),
    "float32": (130, 4, 2, 100, 257, "silu", 2, True, "float32", "output"),
    "many groups": (700, 512, 8, 64, 72, "silu", 2, False, "bfloat16", "output"),
    "one token": (1, 8, 3, 128, 64, "silu", 2, False, "bfloat16", "output"),
}
TOLERANCE = {"bfloat16": 1.2e-2, "float16": 2e-3, "float32": 1e-5}


class TestTriton(GroupedMatmulBase, PublishedGrids):
    backend = "triton"
    full_size = True

    @pytest.fixture(autouse=True)
    def full_precision(self):
        """XLA on a GPU, which the base compares with, rounds float32 products otherwise."""
        with jax.default_matmul_precision("highest"):
            yield


class TestTritonLayers(PublishedLayers):
    backend = "triton"
    full_size = True


def operands(case, seed=0):
    tokens, experts, top_k, features, hidden, _, branches, biases, dtype, apply_to = case
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape) * scale).astype(dtype)

    x, cotangent = normal(tokens, features), normal(tokens, features)
    wi = normal(experts, branches, features, hidden, scale=features**-0.5)
    wo = normal(experts, hidden, features, scale=hidden**-0.5)
    wi_bias = normal(experts, branches, hidden) if biases else None
    wo_bias = normal(experts, features) if biases else None
    logits = jax.random.normal(next(keys), (tokens, experts))
    scores, ids = jax.lax.top_k(logits, top_k)
    if tokens > 1:
        ids = ids.at[0, 0].set(experts)  # a slot without an expert
    return (x, wi, wo, jax.nn.softmax(scores), wi_bias, wo_bias), ids, cotangent, apply_to


def with_gradients(ffn, case):
    @jax.jit
    def run(floats, ids, cotangent):
        def call(x, wi, wo, weights, wi_bias, wo_bias):
            routing = moe_flax.Routing(ids, weights, apply_to=case[-1])
            return ffn(x, wi, wo, routing, activation=case[5], wi_bias=wi_bias, wo_bias=wo_bias)

        y, pull = jax.vjp(call, *floats)
        return y, pull(cotangent.astype(y.dtype))

    return run


@pytest.mark.parametrize("name", CASES)
def test_ffn_and_gradients_against_the_reference(name):
    case = CASES[name]
    floats, ids, cotangent, _ = operands(case)
    y, gradients = with_gradients(functools.partial(expert_ffn, backend="triton"), case)(
        floats, ids, cotangent
    )
    wide = [None if x is None else x.astype(jnp.float32) for x in floats]
    wanted, others = with_gradients(expert_ffn_reference, case)(
        tuple(wide), ids, cotangent.astype(jnp.float32)
    )
    bound = TOLERANCE[case[8]]
    assert distance(y, wanted) < bound
    for what, a, b in zip(NAMES, gradients, others, strict=True):
        assert (a is None) == (b is None), what
        if a is not None:
            assert distance(a, b) < bound, what
    used = np.bincount(np.asarray(ids).ravel(), minlength=case[1] + 1)[: case[1]] > 0
    assert not np.asarray(gradients[1], np.float32)[~used].any()


@pytest.mark.parametrize("name", ["long groups", "many groups", "hopper kernel, half tiles"])
def test_twenty_runs_give_the_same_bits(name):
    case = CASES[name]
    run = with_gradients(functools.partial(expert_ffn, backend="triton"), case)
    floats, ids, cotangent, _ = operands(case)
    first = jax.tree.leaves(run(floats, ids, cotangent))
    for _ in range(20):
        for a, b in zip(first, jax.tree.leaves(run(floats, ids, cotangent)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", ["long groups", "no gate", "hopper kernel, half tiles"])
def test_a_nan_token_spoils_its_own_output(name):
    case = CASES[name]
    (x, wi, wo, weights, *_), ids, _, _ = operands(case)
    routing = moe_flax.Routing(ids, weights)
    run = jax.jit(lambda x: expert_ffn(x, wi, wo, routing, activation=case[5], backend="triton"))
    clean, spoilt = (
        np.asarray(run(x), np.float32),
        np.asarray(run(x.at[5].set(jnp.nan)), np.float32),
    )
    others = np.arange(len(clean)) != 5
    np.testing.assert_array_equal(spoilt[others], clean[others])
    assert np.isnan(spoilt[5]).all()


def test_all_tokens_at_one_expert_and_none_anywhere():
    case = CASES["long groups"]
    (x, wi, wo, weights, *_), ids, _, _ = operands(case)
    for expert in (2, case[1]):
        routing = moe_flax.Routing(jnp.full_like(ids, expert).at[:, 1].set(case[1]), weights)
        y = expert_ffn(x, wi, wo, routing, backend="triton")
        wanted = expert_ffn_reference(*(a.astype(jnp.float32) for a in (x, wi, wo)), routing)
        assert float(jnp.linalg.norm(y - wanted)) <= 1e-2 * float(jnp.linalg.norm(wanted))


def test_remat_and_scan_over_layers():
    case = (200, 4, 2, 128, 192, "silu", 2, False, "bfloat16", "output")
    (x, wi, wo, weights, *_), ids, _, _ = operands(case)
    layers = (jnp.stack([wi] * 3), jnp.stack([wo] * 3))

    def loss(layers, backend):
        def layer(x, w):
            out = expert_ffn(x, *w, moe_flax.Routing(ids, weights), backend=backend)
            return x + out, None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    for a, b in zip(
        jax.jit(jax.grad(loss), static_argnums=1)(layers, "triton"),
        jax.jit(jax.grad(loss), static_argnums=1)(layers, "reference"),
        strict=True,
    ):
        assert distance(a, b) < 3e-2


def test_inside_shard_map():
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    case = (64 * count, 4, 2, 128, 192, "silu", 2, False, "bfloat16", "output")
    (x, wi, wo, weights, *_), ids, cotangent, _ = operands(case)

    def local(x, wi, wo, weights, ids):
        return expert_ffn(x, wi, wo, moe_flax.Routing(ids, weights), backend="triton")

    whole = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, whole, whole, spec, spec), out_specs=spec
    )

    def gradients(function):
        def run(x, wi, wo, weights):
            y, pull = jax.vjp(lambda *a: function(*a, ids), x, wi, wo, weights)
            return y, *pull(cotangent)

        return jax.jit(run)(x, wi, wo, weights)

    for a, b in zip(gradients(sharded), gradients(local), strict=True):
        assert distance(a.astype(jnp.float32), b.astype(jnp.float32)) < 1e-2


def test_outputs_past_2_to_the_31_elements():
    rows, n = 2**18, 2**13 + 64
    lhs = jax.random.normal(jax.random.key(0), (rows, 64), jnp.bfloat16)
    rhs = jax.random.normal(jax.random.key(1), (2, 64, n), jnp.bfloat16) / 8
    sizes = jnp.array([rows // 2 + 3, rows // 2 - 3])
    out = grouped_matmul(lhs, rhs, sizes, backend="triton")
    assert out.size > 2**31
    picked = jnp.array([0, rows // 2 + 2, rows // 2 + 3, rows - 1])
    group = jnp.array([0, 0, 1, 1])
    wanted = jnp.einsum(
        "rk,rkn->rn", lhs[picked].astype(jnp.float32), rhs[group].astype(jnp.float32)
    )
    assert distance(out[picked].astype(jnp.float32), wanted) < 5e-3

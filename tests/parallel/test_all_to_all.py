"""Rows that travel once to each device, and come back; batches that pass the buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_flax import Routing
from moe_flax.parallel import ExpertWeights, all_gather, all_to_all, buffer_rows, choose_strategy

PEERS, TOKENS, EXPERTS, K = 4, 40, 8, 2


def test_buffer_rows():
    assert buffer_rows(1000, 1, 4, slack=1.0) == 256  # an even share, rounded up to 8
    assert buffer_rows(64, 8, 2) == 64  # never more than all
    assert buffer_rows(1024, 8, 64) < 1024 / 4
    assert buffer_rows(0, 2, 4) == 0


def test_auto_takes_the_fewest_rows():
    assert choose_strategy("auto", num_tokens=512, k=8, peers=64) is all_to_all
    assert choose_strategy("auto", num_tokens=512, k=8, peers=2) is all_gather
    assert choose_strategy("auto", num_tokens=4, k=2, peers=8) is all_gather


def scale_by_expert(tokens, routing, weights):
    """An FFN with one number an expert, that also counts the rows it was given."""
    scale = jnp.concatenate([weights.wi[:, 0, 0, 0], jnp.zeros(1)])[routing.expert_ids]
    return jnp.sum(scale * routing.weights, axis=-1, keepdims=True) * tokens


@functools.cache
def exchange():
    mesh = jax.make_mesh((PEERS,), ("expert",), axis_types=(AxisType.Auto,))

    def run(tokens, ids, slot_weights, scales):
        weights = ExpertWeights(scales[:, None, None, None], scales[:, None, None])
        return all_to_all(
            scale_by_expert, tokens, Routing(ids, slot_weights), weights, axes=("expert",)
        )

    spec = P("expert")
    return jax.jit(
        jax.value_and_grad(
            lambda *a: (lambda y: (jnp.sum(jnp.sin(y)), y))(
                jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)(*a)
            ),
            argnums=(0, 2, 3),
            has_aux=True,
        )
    )


def reference(tokens, ids, slot_weights, scales):
    scale = jnp.where(ids < EXPERTS, scales[jnp.minimum(ids, EXPERTS - 1)], 0)
    y = jnp.sum(scale * slot_weights, axis=-1, keepdims=True) * tokens
    return jnp.sum(jnp.sin(y)), y


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["even", "one", "few", "dropped"]))
def test_equals_no_exchange(seed, kind):
    """Also with all tokens on one expert, where the buffers are too small."""
    assert buffer_rows(TOKENS // PEERS, K, PEERS) < TOKENS // PEERS
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(TOKENS, EXPERTS))
    if kind == "one":
        scores[:, rng.integers(EXPERTS)] += 100
    if kind == "few":
        scores[:, rng.permutation(EXPERTS)[:2]] += 100
    ids = np.argsort(-scores, axis=-1)[:, :K].astype(np.int32)
    if kind == "dropped":
        ids[rng.random(ids.shape) < 0.3] = EXPERTS
    args = (
        jnp.asarray(rng.normal(size=(TOKENS, 3)), jnp.float32),
        jnp.asarray(ids),
        jnp.asarray(rng.random((TOKENS, K)), jnp.float32),
        jnp.asarray(rng.normal(size=EXPERTS), jnp.float32),
    )
    (_, y), grads = exchange()(*args)
    (_, want), want_grads = jax.value_and_grad(reference, argnums=(0, 2, 3), has_aux=True)(*args)
    for got, expected in zip((y, *grads), (want, *want_grads), strict=True):
        assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("skewed", [False, True])
def test_bytes_over_the_links(skewed):
    """The exchange is one all-to-all of P * buffer_rows rows each way, behind one branch."""
    mesh = jax.make_mesh((PEERS,), ("expert",), axis_types=(AxisType.Auto,))

    def run(tokens, ids, slot_weights, scales):
        weights = ExpertWeights(scales[:, None, None, None], scales[:, None, None])
        return all_to_all(
            scale_by_expert, tokens, Routing(ids, slot_weights), weights, axes=("expert",)
        )

    spec = P("expert")
    text = str(
        jax.make_jaxpr(jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec))(
            jnp.zeros((TOKENS, 3)),
            jnp.zeros((TOKENS, K), jnp.int32),
            jnp.zeros((TOKENS, K)),
            jnp.zeros(EXPERTS),
        )
    )
    rows = buffer_rows(TOKENS // PEERS, K, PEERS)
    assert text.count("all_to_all") == 4
    assert f"f32[{PEERS},{rows},3]" in text

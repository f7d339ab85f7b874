import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_flax import MoE
from moe_flax.capacity import apply_capacity, expert_capacity, tokens_an_expert_takes
from moe_flax.config import MoEConfig, RouterConfig
from moe_flax.forward import route_tokens
from moe_flax.parallel.mesh import DeviceAxes
from moe_flax.routing import Routing, route


def reference(ids, weights, num_experts, sentinel, capacity, priority, renormalize):
    """Walks the slots in order of priority and fills experts until they are full."""
    tokens, k = ids.shape
    order = list(range(tokens))
    if priority == "weight":
        order.sort(key=lambda t: -max(weights[t]))
    slots = [(t, s) for s in range(k) for t in order]
    if priority == "token":
        slots.sort(key=lambda slot: slot[0])
    taken = dict.fromkeys(range(num_experts), 0)
    ids, weights = ids.copy(), weights.astype(np.float64)
    for t, s in slots:
        expert = ids[t, s]
        if expert < num_experts:
            taken[expert] += 1
            if taken[expert] > capacity:
                ids[t, s], weights[t, s] = sentinel, 0
    if renormalize:
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return ids, weights


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
    tokens=st.sampled_from([0, 1, 12]),
    k=st.sampled_from([1, 3]),
    identity=st.sampled_from([0, 2]),
    capacity=st.integers(0, 5),
    priority=st.sampled_from(["slot", "token", "weight"]),
    renormalize=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_a_walk_over_slots(tokens, k, identity, capacity, priority, renormalize, seed):
    logits = np.random.default_rng(seed).normal(size=(tokens, 4 + identity)).astype(np.float32)
    routing = route(
        jnp.asarray(logits), RouterConfig(num_identity_experts=identity, renormalize=False), k
    )
    out = apply_capacity(
        routing,
        4,
        capacity,
        num_identity_experts=identity,
        priority=priority,
        renormalize=renormalize,
    )
    ids, weights = reference(
        np.asarray(routing.expert_ids),
        np.asarray(routing.weights),
        4,
        4 + identity,
        capacity,
        priority,
        renormalize,
    )
    np.testing.assert_array_equal(out.expert_ids, ids)
    np.testing.assert_allclose(out.weights, weights, rtol=1e-6)
    assert out.expert_ids.dtype == jnp.int32
    assert out.probabilities is routing.probabilities


def test_priorities_by_hand():
    ids = jnp.array([[0, 1], [1, 0], [0, 1]])
    weights = jnp.array([[0.6, 0.4], [0.55, 0.45], [0.9, 0.1]])
    routing = Routing(ids, weights, apply_to="input")
    kept = {
        # One place an expert. By slot: 0 goes to token 0, 1 to token 1, both as first choices.
        "slot": [[0, 2], [1, 2], [2, 2]],
        "token": [[0, 1], [2, 2], [2, 2]],
        "weight": [[2, 2], [1, 2], [0, 2]],
    }
    for priority, expected in kept.items():
        out = apply_capacity(routing, 2, 1, priority=priority)
        np.testing.assert_array_equal(out.expert_ids, expected, err_msg=priority)
        assert out.apply_to == "input"


def test_enough_capacity_changes_nothing():
    routing = route(jax.random.normal(jax.random.key(0), (16, 4)), RouterConfig(), 2)
    for priority in ("slot", "token", "weight"):
        out = apply_capacity(routing, 4, 16, priority=priority)
        np.testing.assert_array_equal(out.expert_ids, routing.expert_ids)
        np.testing.assert_array_equal(out.weights, routing.weights)


def test_transforms_and_gradient():
    logits = jax.random.normal(jax.random.key(1), (3, 8, 4))

    def one(x):
        out = apply_capacity(route(x, RouterConfig(), 2), 4, 3, priority="weight", renormalize=True)
        return dataclasses.replace(out, probabilities=None)

    plain = jax.tree.map(lambda *parts: jnp.stack(parts), *[one(x) for x in logits])
    mapped = jax.jit(jax.vmap(one))(logits)
    np.testing.assert_array_equal(plain.expert_ids, mapped.expert_ids)
    np.testing.assert_allclose(plain.weights, mapped.weights, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: jnp.square(one(x).weights).sum()))(logits[0])
    assert np.isfinite(np.asarray(gradient)).all()
    whole = np.asarray((plain.expert_ids[0] < 4).all(-1))
    assert whole.any()
    assert not whole.all()
    assert (np.abs(np.asarray(gradient))[whole].sum(-1) > 0).all()
    np.testing.assert_allclose(np.asarray(gradient)[~whole], 0, atol=1e-6)


def test_expert_capacity():
    assert expert_capacity(64, 8, 2, 1.0) == 16
    assert expert_capacity(65, 8, 2, 1.0) == 17
    assert expert_capacity(64, 8, 1, 1.25) == 10
    assert expert_capacity(0, 8, 2, 1.0) == 0


def nllb(logits, capacity, by_probability, before, scale):
    """NLLB's weights, [T, E], as its description has them: first choices, then second ones."""
    tokens, experts = logits.shape
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p.max(-1), kind="stable") if by_probability else np.arange(tokens)
    ranks = np.argsort(-logits, -1, kind="stable")[:, :2]
    weights, taken = np.zeros((tokens, experts)), np.zeros(experts, int)
    for choice in (0, 1):
        for t in order:
            e = ranks[t, choice]
            taken[e] += 1
            if taken[e] <= capacity:
                weights[t, e] = p[t, e]
    pairs = np.take_along_axis(p if before else weights, ranks, -1).sum(-1, keepdims=True)
    return scale * weights / np.maximum(pairs, np.finfo(np.float32).eps)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("by_probability", [False, True])
def test_nllb(by_probability, before):
    config = MoEConfig.from_hf(
        {
            "model_type": "nllb-moe",
            "d_model": 4,
            "encoder_ffn_dim": 8,
            "num_experts": 6,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "moe_token_dropout": 0.25,
            "moe_eval_capacity_token_fraction": 0.3,
            "batch_prioritized_routing": by_probability,
            "normalize_router_prob_before_dropping": before,
        }
    )
    logits = np.random.default_rng(1).normal(size=(25, 6)).astype(np.float32) + np.arange(6) / 3
    logits = logits.astype(np.float32)
    expected = nllb(logits, math.ceil(0.3 * 25), by_probability, before, 0.75)
    assert (expected.sum(-1) == 0).any()
    mask = jnp.ones(25, bool)
    chosen, _ = route_tokens({}, jnp.asarray(logits), mask, DeviceAxes(), 25, config)
    found = np.zeros((25, 7))
    np.put_along_axis(found, np.asarray(chosen.expert_ids), np.asarray(chosen.weights), -1)
    np.testing.assert_allclose(found[:, :6], expected, rtol=1e-5, atol=1e-7)


def by_sequence(scope="sequence", **kwargs):
    config = RouterConfig(expert_capacity=2, capacity_scope=scope, renormalize=False)
    init = nnx.initializers.normal(0.5)
    return MoE(16, 8, 4, 1, router=config, kernel_init=init, rngs=nnx.Rngs(0), **kwargs)


def test_each_sequence_has_its_own_places():
    """As Switch counts them: three sequences of 7 tokens, 2 places an expert."""
    layer, x = by_sequence(), jax.random.normal(jax.random.key(0), (3, 7, 16))
    y, aux = layer(x, return_aux=True)
    ids = np.asarray(jnp.argmax(layer.router(x), -1))
    dropped = np.array([[np.sum(row[:t] == row[t]) >= 2 for t in range(7)] for row in ids])
    assert 0 < dropped.sum() < dropped.size
    np.testing.assert_array_equal(np.asarray(y == 0).all(-1), dropped)
    assert aux.dropped_fraction == pytest.approx(dropped.mean())
    for row in range(3):
        np.testing.assert_allclose(layer(x[row]), y[row], atol=1e-6)
    batch = by_sequence("batch")(x.reshape(21, 16))
    assert np.asarray(batch == 0).all(-1).sum() > dropped.sum()
    np.testing.assert_array_equal(by_sequence("batch")(x).reshape(21, 16), batch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 4}, {"expert": 2, "tensor": 2}])
def test_sequences_on_a_mesh(sizes):
    """21 tokens do not divide over the devices, nor do sequences lie on one."""
    x = jax.random.normal(jax.random.key(0), (3, 7, 16))
    expected = by_sequence()(x)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    np.testing.assert_allclose(by_sequence(mesh=mesh)(x), expected, atol=1e-5)


def test_places_that_are_enough():
    for config, tokens, expected in (
        (RouterConfig(), 8, None),
        (RouterConfig(expert_capacity=8), 8, None),
        (RouterConfig(expert_capacity=7), 8, 7),
        (RouterConfig(capacity_fraction=0.3), 11, 4),
        (RouterConfig(capacity_fraction=1.0), 11, None),
        (RouterConfig(capacity_factor=1.25), 64, 20),
    ):
        assert tokens_an_expert_takes(config, tokens, 8, 2) == expected


def test_bad_input():
    with pytest.raises(ValueError, match=r"got expert_capacity, capacity_fraction"):
        RouterConfig(expert_capacity=3, capacity_fraction=0.5)
    with pytest.raises(ValueError, match=r"capacity_fraction must be positive or None, got -1\.0"):
        RouterConfig(capacity_fraction=-1.0)
    with pytest.raises(ValueError, match="capacity_renormalize needs renormalize=True"):
        RouterConfig(renormalize=False, capacity_renormalize=True)
    routing = Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    with pytest.raises(ValueError, match="priority must be 'slot', 'token' or 'weight', got 'x'"):
        apply_capacity(routing, 4, 1, priority="x")  # pyright: ignore
    with pytest.raises(ValueError, match="capacity must be >= 0, got -1"):
        apply_capacity(routing, 4, -1)

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.capacity import apply_capacity, expert_capacity
from moe_flax.config import RouterConfig
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


def test_bad_input():
    routing = Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    with pytest.raises(ValueError, match="priority must be 'slot', 'token' or 'weight', got 'x'"):
        apply_capacity(routing, 4, 1, priority="x")  # pyright: ignore
    with pytest.raises(ValueError, match="capacity must be >= 0, got -1"):
        apply_capacity(routing, 4, -1)

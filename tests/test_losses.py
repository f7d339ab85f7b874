import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_flax.capacity import apply_capacity
from moe_flax.config import RouterConfig
from moe_flax.losses import (
    load_balancing_loss,
    max_violation,
    moe_aux,
    router_z_loss,
    routing_statistics,
    tokens_per_expert,
    update_correction_bias,
)
from moe_flax.routing import Routing, route

E, K, T = 8, 2, 32


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def huggingface(layers, k, mask=None):
    """E * sum(f * P) over the logits of all layers laid end to end; padding is left out."""
    logits = np.concatenate([np.asarray(x, np.float64) for x in layers])
    mask = np.ones(len(logits)) if mask is None else np.tile(mask, len(layers))
    p = softmax(logits)
    chosen = np.zeros((k, *p.shape))
    for t in range(len(p)):
        for slot, expert in enumerate(np.argsort(-p[t], kind="stable")[:k]):
            chosen[slot, t, expert] = 1
    f = (chosen * mask[:, None]).sum(1) / mask.sum()
    return p.shape[1] * (f * (p * mask[:, None]).sum(0) / mask.sum()).sum()


def reference(logits, routing, num_experts, mask, probabilities):
    """MoEAux's numbers by loops over tokens; the Switch form."""
    logits = np.asarray(logits, np.float64)
    ids = np.asarray(routing.expert_ids)
    counts, p_sum = np.zeros(num_experts), np.zeros(num_experts)
    z = entropy = tokens = dropped = 0
    for t in range(len(logits)):
        if not mask[t]:
            continue
        tokens += 1
        p = softmax(logits[t]) if probabilities == "softmax" else routing.probabilities[t]
        p = np.asarray(p, np.float64)
        p_sum += p[:num_experts]
        entropy -= sum(v * np.log(v) for v in p if v > 0)
        z += np.log(np.exp(logits[t]).sum()) ** 2
        for e in ids[t]:
            if e < num_experts:
                counts[e] += 1
            dropped += e >= logits.shape[1]
    tokens, slots = max(tokens, 1), max(tokens * ids.shape[1], 1)
    return {
        "load_balancing_loss": num_experts * (counts / slots * p_sum / tokens).sum(),
        "router_z_loss": z / tokens,
        "tokens_per_expert": counts,
        "dropped_fraction": dropped / slots,
        "router_entropy": entropy / tokens,
    }


routed = jax.jit(route, static_argnums=(1, 2))
aux_of = jax.jit(
    lambda *args, **kwargs: moe_aux(routing_statistics(*args, **kwargs)), static_argnums=2
)


def make(seed=0, tokens=T, identity=0, **config):
    logits = jax.random.normal(jax.random.key(seed), (tokens, E + identity)) * 2
    return logits, routed(logits, RouterConfig(num_identity_experts=identity, **config), K)


def assert_close(first, second, rtol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), first, second)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("probabilities", ["softmax", "scores"])
@pytest.mark.parametrize(("identity", "capacity"), [(0, None), (0, 3), (3, 3)])
def test_aux_equals_the_reference(score, probabilities, identity, capacity):
    logits, routing = make(1, identity=identity, score=score)
    mask = np.arange(T) % 5 != 3
    if capacity is not None:
        routing = apply_capacity(routing, E, capacity, num_identity_experts=identity)
    statistics = routing_statistics(
        logits, routing, E, mask=jnp.asarray(mask), probabilities=probabilities
    )
    aux = moe_aux(statistics)
    for name, value in reference(logits, routing, E, mask, probabilities).items():
        np.testing.assert_allclose(getattr(aux, name), value, rtol=2e-6, err_msg=name)
    assert aux.tokens_per_expert.dtype == jnp.int32
    assert aux.load_balancing_loss.dtype == jnp.float32
    assert (float(aux.dropped_fraction) > 0) == (capacity is not None)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_huggingface_form_over_layers(k, masked):
    layers = [jax.random.normal(jax.random.key(s), (T, E)) * 2 for s in range(3)]
    mask = np.arange(T) % 4 != 0 if masked else None
    parts = [
        routing_statistics(
            x, route(x, RouterConfig(), k), E, mask=None if mask is None else jnp.asarray(mask)
        )
        for x in layers
    ]
    loss = load_balancing_loss(jax.tree.map(lambda *p: sum(p), *parts), form="huggingface")
    np.testing.assert_allclose(loss, huggingface(layers, k, mask), rtol=1e-6)


def test_values_at_balance():
    ids = jnp.arange(T * K).reshape(T, K) % E
    routing = Routing(ids, jnp.ones((T, K)))
    statistics = routing_statistics(jnp.zeros((T, E)), routing, E)
    np.testing.assert_allclose(load_balancing_loss(statistics), 1.0, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(statistics, form="huggingface"), K, rtol=1e-6)
    aux = moe_aux(statistics)
    np.testing.assert_allclose(aux.router_entropy, np.log(E), rtol=1e-6)
    np.testing.assert_allclose(aux.router_z_loss, np.log(E) ** 2, rtol=1e-6)
    assert max_violation(aux.tokens_per_expert) == 0
    collapsed = Routing(jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1)))
    certain = jnp.zeros((T, E)).at[:, 0].set(100.0)
    statistics = routing_statistics(certain, collapsed, E)
    np.testing.assert_allclose(load_balancing_loss(statistics), E, rtol=1e-6)
    assert max_violation(statistics.counts) == E - 1
    np.testing.assert_allclose(moe_aux(statistics).router_entropy, 0, atol=1e-6)


@jax.jit
def masked_statistics(logits, routing, mask):
    return routing_statistics(logits, routing, E, mask=mask)


@hypothesis.settings(deadline=None, max_examples=10)
@hypothesis.given(
    cuts=st.lists(st.sampled_from([0, 5, 20, 32]), max_size=3), seed=st.integers(0, 99)
)
def test_sums_of_parts_are_the_sum_of_the_whole(cuts, seed):
    logits, routing = make(seed)
    mask = jnp.asarray(np.random.default_rng(seed).random(T) < 0.7)
    edges = [0, *sorted(cuts), T]
    parts = []
    for a, b in itertools.pairwise(edges):
        part = jax.tree.map(lambda x, a=a, b=b: x[a:b], routing)
        parts.append(masked_statistics(logits[a:b], part, mask[a:b]))
    total = jax.tree.map(lambda *p: sum(p), *parts)
    assert_close(total, masked_statistics(logits, routing, mask))


def test_per_sequence_loss():
    logits, routing = make(2)
    mask = np.ones(T, bool)
    mask[5:8] = False  # a part of the first sequence
    mask[16:24] = False  # a whole one
    statistics = routing_statistics(
        logits, routing, E, mask=jnp.asarray(mask), sequence_ids=jnp.arange(4), num_sequences=4
    )
    losses = []
    for row in (0, 1, 3):
        rows = slice(row * 8, row * 8 + 8)
        part = jax.tree.map(lambda x, rows=rows: x[rows], routing)
        losses.append(
            reference(logits[rows], part, E, mask[rows], "softmax")["load_balancing_loss"]
        )
    out = load_balancing_loss(statistics, per_sequence=True)
    np.testing.assert_allclose(out, np.mean(losses), rtol=1e-6)
    both = load_balancing_loss(statistics, per_sequence=True, form="huggingface")
    np.testing.assert_allclose(both, K * np.mean(losses), rtol=1e-6)
    assert abs(float(out) - float(load_balancing_loss(statistics))) > 1e-3
    assert moe_aux(statistics, per_sequence=True).load_balancing_loss == out


def test_padding_counts_nowhere_and_keeps_gradients_finite():
    logits, _ = make(3)
    mask = jnp.arange(T) < 20
    dirty = logits.at[20:].set(jnp.nan).at[25].set(jnp.inf)

    def losses(x, mask):
        statistics = routing_statistics(x, route(x, RouterConfig(), K), E, mask=mask)
        aux = moe_aux(statistics)
        return aux.load_balancing_loss + aux.router_z_loss + aux.router_entropy, aux

    loss = jax.jit(jax.value_and_grad(losses, has_aux=True))
    (_, aux), gradient = loss(dirty, mask)
    (_, alone), expected = loss(logits[:20], None)
    assert_close(aux, alone)
    np.testing.assert_allclose(gradient[:20], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(gradient[20:], 0)


def test_demand_is_counted_ahead_of_drops():
    logits, routing = make(4)
    kept = apply_capacity(routing, E, 2)
    demand = routing_statistics(logits, routing, E)
    both = routing_statistics(logits, routing, E, kept=kept)
    np.testing.assert_array_equal(both.counts, demand.counts)
    assert both.num_dropped == (kept.expert_ids == E).sum() > 0
    assert routing_statistics(logits, kept, E).counts.max() == 2


def test_gradient_goes_through_probabilities_only():
    logits, routing = make(5)
    load = np.asarray(tokens_per_expert(routing.expert_ids, E)) / (T * K)

    def by_hand(x):
        return E * (load * jax.nn.softmax(x, axis=-1).mean(0)).sum()

    def loss(x):
        return load_balancing_loss(routing_statistics(x, route(x, RouterConfig(), K), E))

    np.testing.assert_allclose(
        jax.grad(loss)(logits), jax.grad(by_hand)(logits), rtol=1e-5, atol=1e-9
    )
    z = jax.grad(lambda x: router_z_loss(routing_statistics(x, routing, E)))(logits)
    expected = jax.grad(lambda x: jnp.square(jax.nn.logsumexp(x, axis=-1)).mean())(logits)
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-9)


def test_minus_infinity_logits_have_finite_gradients():
    logits, routing = make(6)
    logits = logits.at[:, 7].set(-jnp.inf)

    def loss(x):
        aux = moe_aux(routing_statistics(x, routing, E))
        return aux.load_balancing_loss + aux.router_z_loss + aux.router_entropy

    aux, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(aux)
    assert np.isfinite(np.asarray(gradient)).all()


def statistics_of(logits, mask, sequence_ids=None):
    return routing_statistics(
        logits,
        route(logits, RouterConfig(score="sigmoid"), K),
        E,
        mask=mask,
        probabilities="scores",
        sequence_ids=sequence_ids,
        num_sequences=8,
    )


def test_tokens_are_summed_over_devices_without_a_mask():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    logits, _ = make(7)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=True)
    def sharded(x):
        return jax.lax.psum(statistics_of(x, None), "data")

    assert_close(jax.jit(sharded)(logits), statistics_of(logits, None))


MESHES = [
    ((8,), ("data",), AxisType.Auto),
    ((2, 4), ("data", "expert"), AxisType.Explicit),
    ((2, 2, 2), ("data", "expert", "tensor"), AxisType.Auto),
]


@pytest.mark.parametrize(("sizes", "names", "kind"), MESHES)
def test_on_a_mesh_every_device_has_the_single_device_numbers(sizes, names, kind):
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    axes = tuple(name for name in names if name != "tensor")
    logits, _ = make(7)
    mask = jnp.arange(T) % 7 != 2
    ids = jnp.arange(8)

    def losses(statistics):
        aux = moe_aux(statistics)
        per_sequence = load_balancing_loss(statistics, per_sequence=True)
        return aux.load_balancing_loss + aux.router_z_loss + per_sequence, aux

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(axes), P(axes), P(axes)),
        out_specs=P(),
        check_vma=True,
    )
    def sharded(x, mask, ids):
        return losses(jax.lax.psum(statistics_of(x, mask, ids), axes))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(axes), P(axes), P(axes)), out_specs=P(names)
    )
    def on_each_device(x, mask, ids):
        loss, aux = losses(jax.lax.psum(statistics_of(x, mask, ids), axes))
        return jax.lax.pcast(jnp.stack([loss, aux.router_entropy])[None], names, to="varying")

    def single(x, mask, ids):
        return losses(statistics_of(x, mask, ids))

    (value, aux), gradient = jax.jit(jax.value_and_grad(single, has_aux=True))(logits, mask, ids)
    with jax.set_mesh(mesh):
        if kind == AxisType.Explicit:
            logits, mask, ids = jax.reshard((logits, mask, ids), P(axes))
        (out, aux_out), gradient_out = jax.jit(
            jax.value_and_grad(lambda x: sharded(x, mask, ids), has_aux=True)
        )(logits)
        each = np.asarray(jax.jit(on_each_device)(logits, mask, ids))
    assert_close((out, aux_out), (value, aux))
    np.testing.assert_allclose(gradient_out, gradient, rtol=1e-5, atol=1e-7)
    assert each.shape == (8, 2)
    np.testing.assert_array_equal(each, np.broadcast_to(each[0], each.shape))


def test_rows_may_be_parts_of_sequences():
    """Two devices, each with half of every sequence: their sums give the losses of whole ones."""
    logits, _ = make(8)
    rows = jnp.arange(T).reshape(8, 4)
    parts = [
        statistics_of(logits[rows[:, half].reshape(-1)], None, jnp.arange(8))
        for half in (slice(0, 2), slice(2, 4))
    ]
    whole = statistics_of(logits, None, jnp.arange(8))
    assert_close(jax.tree.map(jnp.add, *parts), whole)


def test_scan_and_remat_over_layers():
    key = jax.random.key(9)
    layers = jax.random.normal(key, (3, T, E))

    def body(total, x, wrap):
        f = jax.checkpoint(statistics_of) if wrap else statistics_of
        statistics = f(x, jnp.ones(T, bool))
        return jax.tree.map(jnp.add, total, statistics), moe_aux(statistics)

    def loss(layers, wrap):
        shapes = jax.eval_shape(statistics_of, layers[0], jnp.ones(T, bool))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, auxes = jax.lax.scan(lambda c, x: body(c, x, wrap), zero, layers)
        return load_balancing_loss(total) + router_z_loss(total), auxes

    def unrolled(layers):
        parts = [statistics_of(x, jnp.ones(T, bool)) for x in layers]
        total = jax.tree.map(lambda *p: sum(p), *parts)
        return load_balancing_loss(total) + router_z_loss(total)

    expected, expected_gradient = jax.jit(jax.value_and_grad(unrolled))(layers)
    for wrap in (False, True):
        (value, auxes), gradient = jax.jit(
            jax.value_and_grad(functools.partial(loss, wrap=wrap), has_aux=True)
        )(layers)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
        assert auxes.tokens_per_expert.shape == (3, E)
        assert auxes.load_balancing_loss.shape == (3,)


def test_no_tokens_at_all():
    for tokens, mask in ((0, None), (4, jnp.zeros(4, bool))):
        logits, routing = make(0, tokens)
        aux = aux_of(logits, routing, E, mask=mask)
        for value in jax.tree.leaves(aux):
            np.testing.assert_array_equal(value, 0)
    assert max_violation(jnp.zeros(4, jnp.int32)) == 0


def test_max_violation():
    loads = jnp.array([[4, 4, 4, 4], [8, 4, 4, 0]])
    np.testing.assert_allclose(max_violation(loads), [0.0, 1.0])


def test_update_correction_bias():
    bias = jnp.array([0.0, 1.0, -1.0, 0.5, 7.0, 8.0])
    load = jnp.array([10, 0, 5, 5])
    expected = [-0.1, 1.1, -1.0, 0.5, 7.0, 8.0]  # the last two: identity experts
    np.testing.assert_allclose(update_correction_bias(bias, load, 0.1), expected, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(update_correction_bias)(bias, load.astype(jnp.float32), 0.1), expected, rtol=1e-6
    )


def test_bias_updates_balance_a_skewed_router():
    logits = jax.random.normal(jax.random.key(10), (256, E)) + jnp.linspace(0, 2, E)
    config = RouterConfig(score="sigmoid", correction_bias=True)

    @jax.jit
    def step(bias, _):
        load = tokens_per_expert(route(logits, config, K, correction_bias=bias).expert_ids, E)
        return update_correction_bias(bias, load, 0.01), max_violation(load)

    _, violations = jax.lax.scan(step, jnp.zeros(E), length=100)
    assert violations[0] > 1
    assert violations[-1] < 0.2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, r: routing_statistics(x[:3], r, E), "3 tokens in logits, 32 in routing"),
        (lambda x, r: routing_statistics(x, r, 9), "between 1 and 8, got 9"),
        (
            lambda x, r: routing_statistics(x, r, E, mask=jnp.ones(3, bool)),
            r"shape \(32,\), got \(3,\)",
        ),
        (
            lambda x, r: routing_statistics(x, r, E, probabilities="p"),
            "'softmax', or 'scores'.* got 'p'",
        ),
        (
            lambda x, r: routing_statistics(
                x, Routing(r.expert_ids, r.weights), E, probabilities="scores"
            ),
            "where routing.probabilities is there",
        ),
        (
            lambda x, r: routing_statistics(x, r, E, sequence_ids=jnp.arange(5), num_sequences=5),
            "sequence_ids of 5 rows must divide 32 tokens",
        ),
        (
            lambda x, r: routing_statistics(x, r, E, sequence_ids=jnp.arange(4)),
            "need num_sequences >= 1, got 0",
        ),
        (
            lambda x, r: load_balancing_loss(routing_statistics(x, r, E), form="mean"),
            "form must be 'switch' or 'huggingface', got 'mean'",
        ),
        (
            lambda x, r: load_balancing_loss(routing_statistics(x, r, E), per_sequence=True),
            "per_sequence needs routing_statistics",
        ),
        (
            lambda x, r: update_correction_bias(jnp.ones(4), jnp.ones(5), 0.1),
            r"got shapes \(4,\) and \(5,\)",
        ),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    logits, routing = make(0)
    with pytest.raises(ValueError, match=message):
        call(logits, routing)

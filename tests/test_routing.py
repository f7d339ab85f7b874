import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.config import RouterConfig
from moe_flax.routing import input_jitter, route

NEAR = 1e-5  # choice scores relatively closer than this, but not equal, are rounding's to order


def reference(logits, config, k, bias=None, per_expert_scale=None):
    """One token in float64, by loops. Returns ids, weights and the closest call of the choice."""
    x = [float(v) for v in logits]
    if config.logit_softcap is not None:
        x = [config.logit_softcap * math.tanh(v / config.logit_softcap) for v in x]
    score = {
        "softmax": lambda v: math.exp(v - max(x)) / sum(math.exp(u - max(x)) for u in x),
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "identity": lambda v: v,
        "sqrt_softplus": lambda v: math.sqrt(math.log1p(math.exp(v))),
    }[config.score]
    scores = [score(v) for v in x]
    choice = scores if bias is None else [s + float(b) for s, b in zip(scores, bias, strict=True)]
    largest = 0 if bias is None else max(abs(float(b)) for b in bias)
    margins = []

    def best(values, count):
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        for i, j in itertools.pairwise(order[: count + 1]):
            if values[i] != values[j] and values[i] > -math.inf:
                size = max(abs(values[i]), abs(values[j]) if values[j] > -math.inf else 0, largest)
                margins.append((values[i] - values[j]) / size)
        return order[:count]

    if config.num_groups > 1:
        size = len(x) // config.num_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(config.num_groups)]
        top = 1 if config.group_score == "max" else 2
        group_scores = [sum(sorted(group, reverse=True)[:top]) for group in groups]
        kept = best(group_scores, config.num_selected_groups)
        masked = -math.inf if config.group_mask == "-inf" else 0.0
        choice = [v if i // size in kept else masked for i, v in enumerate(choice)]
    ids = best(choice, k)

    weights = [scores[i] for i in ids]
    if config.weight_activation == "softmax":
        weights = [math.exp(w - max(weights)) for w in weights]
        weights = [w / sum(weights) for w in weights]
    elif config.weight_activation == "sigmoid":
        weights = [1 / (1 + math.exp(-w)) for w in weights]
    if config.renormalize:
        p, epsilon = config.renormalize_order, config.renormalize_epsilon
        if p == 1:
            norm = sum(weights)
        elif math.isinf(p):
            norm = max(abs(w) for w in weights)
        else:
            norm = sum(abs(w) ** p for w in weights) ** (1 / p)
        norm = max(norm, epsilon) if config.renormalize_mode == "max" else norm + epsilon
        weights = [w / norm for w in weights]
    weights = [w * config.scale for w in weights]
    if per_expert_scale is not None:
        weights = [w * float(per_expert_scale[i]) for w, i in zip(weights, ids, strict=True)]
    return ids, weights, min(margins, default=math.inf)


@functools.partial(jax.jit, static_argnames=("config", "k"))
def routed(logits, config, k, bias=None, per_expert_scale=None):
    return route(logits, config, k, correction_bias=bias, per_expert_scale=per_expert_scale)


def check(logits, config, k, bias=None, scale=None):
    """Compares all tokens whose choice does not hang on rounding; returns how many there were."""
    logits = np.asarray(logits, np.float32)
    routing = route(
        jnp.asarray(logits),
        config,
        k,
        correction_bias=None if bias is None else jnp.asarray(bias),
        per_expert_scale=None if scale is None else jnp.asarray(scale),
    )
    assert routing.expert_ids.shape == routing.weights.shape == (len(logits), k)
    assert routing.expert_ids.dtype == jnp.int32
    assert routing.weights.dtype == routing.probabilities.dtype == jnp.float32
    compared = 0
    for token in range(len(logits)):
        ids, weights, margin = reference(
            logits[token], config, k, None if bias is None else list(bias), scale
        )
        if margin < NEAR:
            continue
        compared += 1
        assert routing.expert_ids[token].tolist() == ids
        np.testing.assert_allclose(routing.weights[token], weights, rtol=2e-5, atol=1e-7)
    return compared


CONFIGS = st.builds(
    RouterConfig,
    score=st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]),
    renormalize=st.booleans(),
    renormalize_epsilon=st.sampled_from([0.0, 1e-20, 1e-6, 0.5]),
    renormalize_mode=st.sampled_from(["add", "max"]),
    renormalize_order=st.sampled_from([1.0, 2.0, math.inf]),
    scale=st.sampled_from([1.0, 2.5]),
    num_groups=st.sampled_from([1, 2, 4, 12]),
    group_score=st.sampled_from(["top2_sum", "max"]),
    group_mask=st.sampled_from(["-inf", "0"]),
    correction_bias=st.booleans(),
    logit_softcap=st.sampled_from([None, 10.0]),
    per_expert_scale=st.booleans(),
)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(CONFIGS, st.data())
def test_every_combination_equals_the_reference(config, data):
    selected = data.draw(st.integers(1, config.num_groups), label="selected groups")
    config = RouterConfig(**{**vars(config), "num_selected_groups": selected, "apply_to": "input"})
    available = 12 // config.num_groups * selected
    k = data.draw(st.sampled_from([k for k in (1, 2, 5) if k <= available]), label="k")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    logits = rng.normal(size=(6, 12)) * data.draw(st.sampled_from([0.3, 1.0, 5.0]))
    logits[1] = np.round(logits[1])  # ties
    logits[2] = 0.25
    offset = data.draw(st.sampled_from([0.0, -2.0, 8.0, 12.0]), label="bias offset")
    bias = (offset + rng.normal(size=12)).astype(np.float32) if config.correction_bias else None
    scale = rng.uniform(0.5, 2, 12).astype(np.float32) if config.per_expert_scale else None
    assert check(logits, config, k, bias, scale) >= 2


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(
    weight_activation=st.sampled_from([None, "softmax", "sigmoid"]),
    renormalize=st.booleans(),
    order=st.sampled_from([2.0, 3.0]),
    k=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_identity_scores(weight_activation, renormalize, order, k, seed):
    config = RouterConfig(
        score="identity",
        weight_activation=weight_activation,
        renormalize=renormalize,
        renormalize_order=order,
    )
    logits = np.random.default_rng(seed).normal(size=(4, 12)) * 3
    assert check(logits, config, k) >= 2


def test_ties_take_the_lowest_index():
    for config in (
        RouterConfig(),
        RouterConfig(score="sigmoid", num_groups=4, num_selected_groups=2),
    ):
        ids = route(jnp.zeros((2, 12)), config, 4).expert_ids
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    zeros = jnp.array([[-0.0, 0.0, -1.0, -0.0]])
    np.testing.assert_array_equal(route(zeros, RouterConfig(), 3).expert_ids, [[0, 1, 3]])
    bf16 = jnp.array([[1.0, 2.0, 1.0, 2.0, 2.0, 0.0]], jnp.bfloat16)
    np.testing.assert_array_equal(route(bf16, RouterConfig(), 4).expert_ids, [[1, 3, 4, 0]])


def test_logits_decide_where_scores_saturate():
    logits = jnp.array([[0.0, -200.0, -150.0, -300.0], [20.0, 30.0, 40.0, 50.0]])
    for score in ("softmax", "sigmoid", "identity"):
        ids = route(logits, RouterConfig(score=score, renormalize=False), 2).expert_ids
        np.testing.assert_array_equal(ids, [[0, 2], [3, 2]])


def test_bias_chooses_but_never_weighs():
    """With a bias of 12 a score of 1e-8 is lost in the sum; the weight still has all its bits."""
    logits = np.full((1, 8), -18.0, np.float32)
    logits[0] -= np.arange(8) * 0.1
    bias = np.zeros(8, np.float32)
    bias[[5, 2]] = [12.5, 12.0]
    config = RouterConfig(score="sigmoid", correction_bias=True, renormalize=False)
    routing = route(jnp.asarray(logits), config, 2, correction_bias=jnp.asarray(bias))
    np.testing.assert_array_equal(routing.expert_ids, [[5, 2]])
    np.testing.assert_allclose(
        routing.weights[0], 1 / (1 + np.exp(-logits[0, [5, 2]].astype(np.float64))), rtol=1e-6
    )


def test_group_masks_differ_for_negative_choice_scores():
    logits = jnp.array([[3.0, 2.9, -1.0, -1.0]])
    bias = jnp.array([-2.0, -4.0, -5.0, -5.0])
    options = {"score": "sigmoid", "num_groups": 2, "correction_bias": True}
    strict = route(logits, RouterConfig(**options), 2, correction_bias=bias)
    np.testing.assert_array_equal(strict.expert_ids, [[0, 1]])
    zero = route(logits, RouterConfig(**options, group_mask="0"), 2, correction_bias=bias)
    np.testing.assert_array_equal(zero.expert_ids, [[2, 3]])


def test_group_score_of_two_or_of_the_best():
    logits = jnp.array([[2.0, -2.0, 1.0, 1.0]])
    options = {"score": "sigmoid", "num_groups": 2}
    assert route(logits, RouterConfig(**options), 1).expert_ids.tolist() == [[2]]
    assert route(logits, RouterConfig(**options, group_score="max"), 1).expert_ids.tolist() == [[0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "identity", "sqrt_softplus"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_not_finite_logits_spoil_their_token_alone(score, groups, with_bias):
    nan, inf = np.nan, np.inf
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, 8)).astype(np.float32)
    logits[1] = nan
    logits[2, [0, 3]] = nan
    logits[3] = inf
    logits[4] = -inf
    logits[5, [1, 2, 7]] = [inf, -inf, nan]
    logits[6, :6] = -inf
    logits[7, 4] = inf
    config = RouterConfig(
        score=score,
        num_groups=groups,
        num_selected_groups=max(1, groups // 2),
        correction_bias=with_bias,
        renormalize=score != "identity",
    )
    bias = jnp.asarray(rng.normal(size=8).astype(np.float32)) if with_bias else None
    routing = routed(jnp.asarray(logits), config, 4, bias)
    ids = np.asarray(routing.expert_ids)
    assert ((ids >= 0) & (ids < 8)).all()
    for token in range(9):
        assert len(set(ids[token])) == 4
        assert len(set(ids[token] // (8 // groups))) <= max(1, groups // 2) or groups == 1
    good = [0, 8]
    alone = routed(jnp.asarray(logits[good]), config, 4, bias)
    np.testing.assert_array_equal(ids[good], alone.expert_ids)
    np.testing.assert_array_equal(routing.weights[np.array(good)], alone.weights)
    assert np.isfinite(np.asarray(alone.weights)).all()
    if groups == 1 and not (score == "softmax" and with_bias):  # else the whole token is NaN
        assert not set(ids[2]) & {0, 3}, "a NaN expert was preferred to a number"


def test_minus_infinity_in_a_kept_group_still_beats_a_masked_expert():
    logits = jnp.array([[0.0, 0.0, 5.0, -jnp.inf]])
    config = RouterConfig(
        score="identity", num_groups=2, group_score="max", weight_activation="softmax",
        renormalize=False,
    )  # fmt: skip
    routing = route(logits, config, 2)
    np.testing.assert_array_equal(routing.expert_ids, [[2, 3]])
    np.testing.assert_allclose(routing.weights, [[1.0, 0.0]])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_renormalisation_is_right_where_every_score_underflows(score):
    logits = np.full((1, 8), -300.0, np.float32)
    logits[0, 0] = 200.0 if score == "softmax" else -300.0
    logits[0, [3, 4]] = [-200.0, -201.0]
    bias = np.zeros(8, np.float32)
    bias[[3, 4]] = 5.0
    config = RouterConfig(score=score, correction_bias=True)
    routing = route(jnp.asarray(logits), config, 2, correction_bias=jnp.asarray(bias))
    np.testing.assert_array_equal(np.sort(routing.expert_ids), [[3, 4]])
    np.testing.assert_allclose(routing.weights, jax.nn.softmax(jnp.array([[0.0, -1.0]])), rtol=1e-6)


def test_all_zero_weights_stay_zero():
    logits = jnp.full((1, 4), -300.0)
    for order in (1.0, 2.0, math.inf):
        config = RouterConfig(score="sqrt_softplus", renormalize_order=order)
        gradient = jax.grad(lambda x, c=config: route(x, c, 2).weights.sum())(logits)
        np.testing.assert_array_equal(route(logits, config, 2).weights, [[0.0, 0.0]])
        assert np.isfinite(np.asarray(gradient)).all()


def test_softmax_then_top_k_equals_top_k_then_softmax():
    logits = jax.random.normal(jax.random.key(0), (32, 16)) * 4
    first = route(logits, RouterConfig(), 4)
    second = route(
        logits, RouterConfig(score="identity", weight_activation="softmax", renormalize=False), 4
    )
    np.testing.assert_array_equal(first.expert_ids, second.expert_ids)
    np.testing.assert_allclose(first.weights, second.weights, rtol=1e-6)


def test_identity_experts_are_columns_like_others():
    logits = np.random.default_rng(3).normal(size=(5, 10))
    bias = np.random.default_rng(4).normal(size=10).astype(np.float32)
    config = RouterConfig(
        num_identity_experts=4, renormalize=False, scale=6.0, correction_bias=True
    )
    assert check(logits, config, 3, bias) >= 4
    assert check(np.eye(10)[[8]] * 9, RouterConfig(num_identity_experts=4), 7) == 1
    with pytest.raises(ValueError, match="beside num_identity_experts=4, got 0"):
        route(jnp.ones((2, 4)), config, 2, correction_bias=jnp.ones(4))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 8, 2), (1, 8, 2), (3, 8, 8), (3, 1, 1)])
def test_edge_sizes(tokens, experts, k):
    logits = np.random.default_rng(0).normal(size=(tokens, experts))
    for config in (RouterConfig(), RouterConfig(score="sigmoid", renormalize_epsilon=1e-20)):
        assert check(logits, config, k) == tokens
    grouped = RouterConfig(num_groups=experts, num_selected_groups=experts)
    assert check(logits, grouped, k) == tokens


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "identity", "sqrt_softplus"])
def test_probabilities_are_a_distribution(score):
    logits = jax.random.normal(jax.random.key(1), (6, 8)) * 3
    routing = route(logits, RouterConfig(score=score, renormalize=False), 2)
    np.testing.assert_allclose(routing.probabilities.sum(-1), np.ones(6), rtol=1e-6)
    x = np.asarray(logits, np.float64)
    raw = {
        "softmax": np.exp(x),
        "identity": np.exp(x),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(x))),
    }[score]
    np.testing.assert_allclose(
        routing.probabilities, raw / raw.sum(-1, keepdims=True), rtol=1e-5, atol=1e-8
    )


GRADIENT_CONFIGS = [
    RouterConfig(),
    RouterConfig(renormalize=False, scale=2.0, logit_softcap=3.0),
    RouterConfig(score="sigmoid", num_groups=4, num_selected_groups=2, renormalize_epsilon=1e-20),
    RouterConfig(score="sqrt_softplus", renormalize_order=2.0),
    RouterConfig(score="identity", weight_activation="sigmoid", renormalize_mode="max"),
    RouterConfig(selection="sparse_mixer", renormalize=False, jitter=0.5),
]


@pytest.mark.parametrize("config", GRADIENT_CONFIGS, ids=range(len(GRADIENT_CONFIGS)))
def test_gradients_equal_differences(config):
    key, other = jax.random.split(jax.random.key(5))
    # Far enough apart that a step changes no choice.
    logits = jax.random.permutation(key, jnp.linspace(-2.0, 2.0, 8), independent=True)
    logits = jax.vmap(lambda k: jax.random.permutation(k, logits))(jax.random.split(key, 4))
    mix = jax.random.normal(other, (4, 2))

    @jax.jit
    def loss(x):
        routing = route(x, config, 2)
        return (routing.weights * mix).sum() + jnp.square(routing.probabilities).sum()

    direction = jax.random.normal(jax.random.key(6), (4, 8))
    step = 1e-2
    difference = (loss(logits + step * direction) - loss(logits - step * direction)) / (2 * step)
    product = jnp.vdot(jax.grad(loss)(logits), direction)
    np.testing.assert_allclose(product, difference, rtol=5e-3, atol=1e-3)


def test_transforms_give_the_same_numbers():
    config = RouterConfig(
        score="sigmoid", correction_bias=True, num_groups=2, renormalize_epsilon=1e-20
    )
    logits = jax.random.normal(jax.random.key(7), (3, 4, 8))
    bias = jax.random.normal(jax.random.key(8), (8,))

    def one(x):
        return route(x, config, 2, correction_bias=bias)

    plain = jax.tree.map(lambda *parts: jnp.stack(parts), *[one(x) for x in logits])
    for other in (
        jax.jit(jax.vmap(one))(logits),
        jax.lax.scan(lambda carry, x: (carry, one(x)), 0, logits)[1],
        jax.lax.map(jax.checkpoint(one), logits),
    ):
        np.testing.assert_array_equal(plain.expert_ids, other.expert_ids)
        np.testing.assert_allclose(plain.weights, other.weights, rtol=1e-6)
        assert other.apply_to == "output"
    flat = one(logits.reshape(12, 8))
    np.testing.assert_array_equal(plain.expert_ids.reshape(12, 2), flat.expert_ids)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_are_routed_in_float32(dtype):
    logits = (jax.random.normal(jax.random.key(9), (8, 8)) * 3).astype(dtype)
    low = route(logits, RouterConfig(score="sigmoid"), 2)
    full = route(logits.astype(jnp.float32), RouterConfig(score="sigmoid"), 2)
    np.testing.assert_array_equal(low.expert_ids, full.expert_ids)
    np.testing.assert_array_equal(low.weights, full.weights)
    assert low.weights.dtype == jnp.float32


def sparse_mixer_reference(logits, threshold):
    ids, weights, x = [], [], [float(v) for v in logits]
    for _ in range(2):
        rest = [i for i in range(len(x)) if i not in ids]
        best = max(rest, key=lambda i: (x[i], -i))
        near = [i for i in rest if x[best] - x[i] <= 2 * threshold * max(abs(x[i]), x[best])]
        weights.append(math.exp(x[best]) / sum(math.exp(x[i]) for i in near))
        ids.append(best)
    return ids, weights


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
    threshold=st.sampled_from([0.01, 0.1, 0.4]),
    seed=st.integers(0, 2**32),
    shift=st.sampled_from([-3, 0, 3]),
)
def test_sparse_mixer_equals_the_reference(threshold, seed, shift):
    logits = (np.random.default_rng(seed).normal(size=(6, 8)) + shift).astype(np.float32)
    config = RouterConfig(selection="sparse_mixer", jitter=threshold, renormalize=False)
    routing = routed(jnp.asarray(logits), config, 2)
    for token in range(6):
        ids, weights = sparse_mixer_reference(logits[token], threshold)
        assert routing.expert_ids[token].tolist() == ids
        np.testing.assert_allclose(routing.weights[token], weights, rtol=1e-5)


def test_sparse_mixer_of_odd_logits():
    logits = np.zeros((6, 4), np.float32)
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3] = np.inf
    logits[4, [1, 2]] = np.nan
    config = RouterConfig(selection="sparse_mixer", renormalize=False)
    routing = routed(jnp.asarray(logits), config, 2)
    ids = np.asarray(routing.expert_ids)
    assert (ids[:, 0] != ids[:, 1]).all()
    assert ((ids >= 0) & (ids < 4)).all()
    np.testing.assert_array_equal(ids[4], [0, 3])
    np.testing.assert_allclose(routing.weights[0], [1 / 4, 1 / 3], rtol=1e-6)
    with pytest.raises(ValueError, match="takes num_experts_per_token=2, got 1"):
        route(jnp.ones((2, 4)), config, 1)


def test_input_jitter():
    x = jnp.ones((64, 8), jnp.bfloat16)
    noisy = input_jitter(x, 0.25, jax.random.key(0))
    assert noisy.dtype == x.dtype
    assert 0.75 <= noisy.min() < 0.8
    assert 1.2 < noisy.max() <= 1.25
    np.testing.assert_array_equal(input_jitter(x, 0.0, jax.random.key(0)), x)


@pytest.mark.parametrize(
    ("logits", "config", "k", "arrays", "error", "message"),
    [
        ((2, 8), {}, 9, {}, ValueError, "between 1 and 8 .* got 9"),
        ((2, 8), {}, 0, {}, ValueError, "between 1 and 8 .* got 0"),
        ((8,), {}, 2, {}, ValueError, r"\[tokens, experts\], got shape \(8,\)"),
        ((2, 3, 8), {}, 2, {}, ValueError, r"got shape \(2, 3, 8\)"),
        ((2, 9), {"num_groups": 2}, 2, {}, ValueError, "9 experts do not divide into num_groups=2"),
        ((2, 8), {"num_groups": 4}, 3, {}, ValueError, "between 1 and 2 .* got 3"),
        (
            (2, 8),
            {"correction_bias": True},
            2,
            {},
            ValueError,
            r"pass correction_bias of shape \(8,\)",
        ),
        ((2, 8), {"per_expert_scale": True}, 2, {}, ValueError, "pass per_expert_scale"),
        ((2, 8), {}, 2, {"correction_bias": jnp.ones(8)}, ValueError, "correction_bias is False"),
        ((2, 8), {}, 2, {"per_expert_scale": jnp.ones(8)}, ValueError, "per_expert_scale is False"),
        (
            (2, 8),
            {"correction_bias": True},
            2,
            {"correction_bias": jnp.ones((1, 8))},
            ValueError,
            r"must have shape \(8,\).* got \(1, 8\)",
        ),
        (
            (2, 8),
            {"correction_bias": True},
            2,
            {"correction_bias": jnp.ones(8, jnp.bfloat16)},
            TypeError,
            "must be float32, got bfloat16",
        ),
    ],
)
def test_bad_input(logits, config, k, arrays, error, message):
    with pytest.raises(error, match=message):
        route(jnp.ones(logits), RouterConfig(**config), k, **arrays)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool])
def test_logits_must_be_floating_point(dtype):
    with pytest.raises(TypeError, match="logits must be floating point, got"):
        route(jnp.ones((2, 8), dtype), RouterConfig(), 2)

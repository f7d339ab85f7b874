"""The layer on one device: against a plain reference, at its edges, and under Flax transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layer_reference import reference_layer, relative_error

from moe_flax import MoE, MoEConfig, RouterConfig, SharedConfig, losses, preset_names


def make(d=16, f=24, e=8, k=2, seed=0, **kwargs):
    return MoE(d, f, e, k, rngs=nnx.Rngs(seed), **kwargs)


def inputs(*shape, seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"k": 8},
        {"e": 1, "k": 1},
        {"d": 100, "f": 257},
        {"activation": "gpt_oss", "use_bias": True, "router": RouterConfig(logit_bias=True)},
        {"activation": "relu2", "shared": SharedConfig(20)},
        {"shared": SharedConfig(20, combine="average")},
        {"shared": SharedConfig(20, combine="gated"), "activation": "gelu_tanh"},
        {
            "router": RouterConfig(
                score="identity", weight_activation="sigmoid", renormalize=False, apply_to="input"
            ),
            "shared": SharedConfig(24),
        },
        {"router": RouterConfig(score="sigmoid", correction_bias=True, scale=2.5)},
    ],
    ids=str,
)
def test_equals_the_reference(kwargs):
    init = nnx.initializers.normal(0.3)
    layer = make(**kwargs, kernel_init=init, bias_init=init)
    if layer.router.correction_bias is not None:
        layer.router.correction_bias[...] = inputs(8, seed=2)
    x = inputs(3, 5, layer.config.features)
    assert relative_error(layer(x), reference_layer(layer, x)) < 2e-6


@pytest.mark.parametrize("shape", [(16,), (1, 16), (7, 16), (2, 3, 16), (2, 2, 2, 16), (0, 16)])
def test_any_rank(shape):
    layer, x = make(), inputs(*shape)
    y, aux = layer(x, return_aux=True)
    assert y.shape == x.shape
    assert int(aux.tokens_per_expert.sum()) == 2 * np.prod(shape[:-1])
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(aux))
    if x.size:
        assert relative_error(y, reference_layer(layer, x)) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype", "expected"),
    [
        (None, jnp.float32, jnp.bfloat16, jnp.float32),
        (None, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16),
        (jnp.float16, jnp.float32, jnp.float32, jnp.float16),
    ],
)
def test_dtypes(dtype, param_dtype, x_dtype, expected):
    layer = make(dtype=dtype, param_dtype=param_dtype)
    x = inputs(33, 16, dtype=x_dtype)
    y = layer(x)
    assert y.dtype == expected
    assert layer.router.kernel.dtype == jnp.float32
    assert layer.experts.wi.dtype == param_dtype
    bound = {jnp.float32: 2e-6, jnp.bfloat16: 8e-3, jnp.float16: 2e-3}[expected]
    assert relative_error(y, reference_layer(layer, x)) < bound


def test_aux_counts_and_losses():
    layer, x = make(), inputs(40, 16)
    _, aux = layer(x, return_aux=True)
    logits = np.asarray(x @ layer.router.kernel[...], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    counts = np.bincount(chosen.reshape(-1), minlength=8)
    np.testing.assert_array_equal(aux.tokens_per_expert, counts)
    assert aux.load_balancing_loss == pytest.approx(8 * (counts / 80 * p.mean(0)).sum(), rel=1e-5)
    assert aux.router_z_loss == pytest.approx(
        (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rel=1e-5
    )
    assert aux.router_entropy == pytest.approx(-(p * np.log(p)).sum(-1).mean(), rel=1e-5)
    assert aux.dropped_fraction == 0


def test_masked_tokens_cost_and_count_nothing():
    layer, x = make(), inputs(6, 16)
    mask = jnp.array([True, False, True, True, False, True])
    y, aux = layer(x.at[1].set(jnp.nan), mask=mask, return_aux=True)
    alone, alone_aux = layer(x[mask], return_aux=True)
    np.testing.assert_allclose(y[mask], alone, rtol=1e-6)
    np.testing.assert_array_equal(y[~mask], 0)
    for got, expected in zip(jax.tree.leaves(aux), jax.tree.leaves(alone_aux), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_nan_token_spoils_only_itself():
    layer, x = make(shared=SharedConfig(8)), inputs(9, 16)
    y = layer(x.at[4].set(jnp.nan))
    rest = np.arange(9) != 4
    assert jnp.isnan(y[4]).all()
    np.testing.assert_array_equal(y[rest], layer(x)[rest])


def test_capacity_drops_in_order():
    layer = make(e=4, k=1, router=RouterConfig(capacity_factor=0.5))
    layer.router.kernel[...] = jnp.zeros((16, 4))  # ties: every token chooses expert 0
    y, aux = layer(inputs(8, 16), return_aux=True)
    assert aux.dropped_fraction == pytest.approx(7 / 8)
    assert bool((y[0] != 0).any())
    np.testing.assert_array_equal(y[1:], 0)


def test_identity_experts_return_their_input():
    router = RouterConfig(num_identity_experts=3, renormalize=False)
    layer, x = make(e=5, k=2, router=router), inputs(4, 16)
    layer.router.kernel[...] = jnp.zeros((16, 8)).at[:, 5:].set(1.0)
    x = jnp.abs(x)  # positive logits for the identity experts: all tokens choose these
    p = jax.nn.softmax(x @ layer.router.kernel[...], axis=-1)
    expected = p[:, 5:7].sum(-1, keepdims=True) * x
    assert relative_error(layer(x), expected) < 1e-6


def test_correction_bias_evens_the_load():
    layer = make(e=8, k=2, router=RouterConfig(score="sigmoid", correction_bias=True))
    layer.router.kernel[...] = layer.router.kernel[...].at[:, 0].add(0.5)
    x = jnp.abs(inputs(512, 16))

    @nnx.jit
    def step(layer):
        _, aux = layer(x, return_aux=True)
        layer.update_correction_bias(aux.tokens_per_expert, rate=1e-2)
        return losses.max_violation(aux.tokens_per_expert)

    first = float(step(layer))
    for _ in range(60):
        last = float(step(layer))
    assert first > 1.5
    assert last < 0.3 * first


def test_the_correction_bias_is_no_param():
    layer = make(router=RouterConfig(score="sigmoid", correction_bias=True))
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
    assert "router/correction_bias" not in names
    assert len(names) == 3


def test_trains_under_jit_scan_and_remat():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.moe = MoE(16, 24, 4, 2, rngs=rngs)

    def run(blocks, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        @nnx.remat
        def body(block, x):
            y, aux = block.moe(x, return_aux=True)
            return x + y, aux.load_balancing_loss

        return body(blocks, x)

    @nnx.vmap(in_axes=0)
    def create(rngs):
        return Block(rngs)

    blocks = create(nnx.Rngs(0).split(3))
    x = inputs(10, 16)
    y, balance = nnx.jit(run)(blocks, x)
    expected = x
    for i in range(3):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
        expected = expected + reference_layer(block.moe, expected)
    assert balance.shape == (3,)
    assert relative_error(y, expected) < 5e-6

    optimizer = nnx.Optimizer(blocks, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(blocks, optimizer):
        loss, grads = nnx.value_and_grad(lambda b: jnp.mean((run(b, x)[0] - 1) ** 2))(blocks)
        optimizer.update(blocks, grads)
        return loss

    start = float(step(blocks, optimizer))
    for _ in range(20):
        end = float(step(blocks, optimizer))
    assert end < 0.7 * start


def test_gradients_equal_the_references():
    layer, x = make(use_bias=True, shared=SharedConfig(8, combine="gated")), inputs(9, 16)
    got = nnx.grad(lambda m, x: jnp.sum(jnp.sin(m(x))), argnums=(0, 1))(layer, x)
    expected = nnx.grad(lambda m, x: jnp.sum(jnp.sin(reference_layer(m, x))), argnums=(0, 1))(
        layer, x
    )
    errors = jax.tree.map(relative_error, got, expected)
    assert max(jax.tree.leaves(errors)) < 5e-6


def test_the_router_may_see_something_else():
    layer = make(use_bias=True, shared=SharedConfig(8, combine="gated"))
    x, seen = inputs(3, 5, 16), inputs(3, 5, 16, seed=2)
    expected = reference_layer(layer, x, seen)
    assert relative_error(layer(x, router_inputs=seen), expected) < 2e-6
    assert relative_error(expected, reference_layer(layer, x)) > 0.1
    np.testing.assert_array_equal(layer(x, router_inputs=x), layer(x))

    def loss(run):
        return nnx.grad(lambda m, x, seen: jnp.sum(jnp.sin(run(m, x, seen))), argnums=(0, 1, 2))

    got = loss(lambda m, x, seen: m(x, router_inputs=seen))(layer, x, seen)
    wanted = loss(reference_layer)(layer, x, seen)
    assert all(jnp.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(wanted))
    assert max(jax.tree.leaves(jax.tree.map(relative_error, got, wanted))) < 5e-6


def test_router_inputs_are_not_rounded_to_the_layers_dtype():
    """In bfloat16 1 and 1 + 2**-9 are one number, and the first expert would win the tie."""
    layer = make(d=2, e=2, k=1, dtype=jnp.bfloat16)
    layer.router.kernel[...] = jnp.eye(2)
    seen = jnp.array([[1, 1 + 2**-9], [1 + 2**-9, 1]], jnp.float32)
    _, aux = layer(jnp.ones((2, 2)), router_inputs=seen, return_aux=True)
    np.testing.assert_array_equal(aux.tokens_per_expert, [1, 1])


def test_numpy_and_lists_as_inputs():
    layer, x = make(), inputs(3, 16)
    np.testing.assert_array_equal(layer(np.asarray(x)), layer(x))
    np.testing.assert_array_equal(layer(np.asarray(x).tolist()), layer(x))


def test_same_inputs_same_bits():
    layer, x = make(), inputs(50, 16)
    run = nnx.jit(nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x)))))
    first, second = run(layer), run(layer)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("init", [nnx.initializers.lecun_normal(), nnx.initializers.he_uniform()])
def test_initializers_never_count_experts(init):
    layer = make(d=64, f=48, e=16, kernel_init=init)
    keys = jax.random.split(jax.random.key(0), 32)
    wi = np.std([init(key, (64, 48), jnp.float32) for key in keys])
    wo = np.std([init(key, (48, 64), jnp.float32) for key in keys])
    assert float(jnp.std(layer.experts.wi[...])) == pytest.approx(wi, rel=0.03)
    assert float(jnp.std(layer.experts.wo[...])) == pytest.approx(wo, rel=0.03)
    assert not bool((layer.experts.wi[0, 0] == layer.experts.wi[0, 1]).any())


def test_metadata_of_the_caller():
    layer = make(kernel_metadata={"tag": "experts"})
    assert layer.experts.wi.get_metadata("tag") == "experts"
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
    with jax.set_mesh(mesh):
        router_only = make(d=16, f=16, e=8, kernel_init=init)
    assert router_only.router.kernel[...].sharding.spec == jax.P("x", None)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds(name):
    config = MoEConfig.preset(name)
    layer = nnx.eval_shape(lambda: MoE.from_config(config, rngs=nnx.Rngs(0)))
    assert layer.config == config
    wi = layer.experts.wi
    assert wi.shape[0] == config.num_experts
    assert wi.shape[2:] == (config.features, config.hidden_features)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"k": 9}, "between 1 and 8.*got 9"),
        ({"k": 0}, "between 1 and 8.*got 0"),
        ({"activation": "swish"}, "swish.*allowed.*silu"),
        ({"backend": "cuda"}, "cuda.*allowed.*triton"),
        ({"expert_parallel": "ring"}, "ring.*allowed.*all_to_all"),
        ({"d": 0}, "features must be >= 1, got 0"),
        ({"router": RouterConfig(num_groups=3)}, "8 experts do not divide into num_groups=3"),
    ],
)
def test_bad_configuration(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_bad_inputs():
    layer = make()
    with pytest.raises(ValueError, match=r"\[\.\.\., 16\], got shape \(3, 15\)"):
        layer(inputs(3, 15))
    with pytest.raises(ValueError, match=r"\[\.\.\., 16\], got shape \(\)"):
        layer(jnp.float32(1.0))
    for dtype in (jnp.int32, jnp.complex64, jnp.bool_):
        with pytest.raises(TypeError, match="floating dtype"):
            layer(jnp.ones((3, 16), dtype))
    with pytest.raises(ValueError, match=r"mask must be of shape \(3,\), got \(4,\)"):
        layer(inputs(3, 16), mask=jnp.ones(4, bool))
    with pytest.raises(TypeError, match="mask must be of dtype bool, got int32"):
        layer(inputs(3, 16), mask=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"router_inputs must be of the inputs' shape \(3, 16\)"):
        layer(inputs(3, 16), router_inputs=inputs(3, 8))
    with pytest.raises(TypeError, match="router_inputs must be of a floating dtype, got int32"):
        layer(inputs(3, 16), router_inputs=jnp.ones((3, 16), jnp.int32))
    with pytest.raises(TypeError, match=r"param_dtype must be a floating dtype, got.*int8"):
        make(param_dtype=jnp.int8)
    with pytest.raises(TypeError, match=r"mesh must be.*got 3"):
        make(mesh=3)
    with pytest.raises(ValueError, match="no correction bias"):
        layer.update_correction_bias(jnp.ones(8))
    biased = make(router=RouterConfig(score="sigmoid", correction_bias=True))
    with pytest.raises(ValueError, match="7"):
        biased.update_correction_bias(jnp.ones(7))

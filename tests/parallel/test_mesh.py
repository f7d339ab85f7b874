"""On any mesh: outputs, gradients, losses and bias updates equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_flax import MoE, MoEConfig, RouterConfig, SharedConfig

CONFIG = MoEConfig(
    features=16,
    hidden_features=12,
    num_experts=8,
    num_experts_per_token=3,
    router=RouterConfig(score="sigmoid", correction_bias=True, scale=2.0, logit_bias=True),
    shared=SharedConfig(8, combine="gated"),
    use_bias=True,
)
MESHES = {
    "expert8": {"expert": 8},
    "data2-expert4": {"data": 2, "expert": 4},
    "data2-expert2-tensor2": {"data": 2, "expert": 2, "tensor": 2},
    "fsdp2-expert4": {"fsdp": 2, "expert": 4},
}
BIASES = {
    "balanced": np.zeros(8),
    "all to one": np.where(np.arange(8) == 5, 50.0, 0.0),
    "empty experts": np.where(np.isin(np.arange(8), (0, 3, 6)), -50.0, 0.0),
}


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def make_mesh(sizes, kind):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def make_layer(**kwargs):
    init = nnx.initializers.normal(0.3)
    return MoE.from_config(CONFIG, kernel_init=init, bias_init=init, rngs=nnx.Rngs(0), **kwargs)


@nnx.jit
def step(layer, x):
    """All that must be equal: outputs, gradients of all inputs, losses, the updated bias."""

    def loss(layer, x):
        y, aux = layer(x, return_aux=True)
        return jnp.sum(jnp.sin(y)) + aux.load_balancing_loss + aux.router_z_loss, (y, aux)

    (_, (y, aux)), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    layer.update_correction_bias(aux.tokens_per_expert, rate=0.1)
    return y, aux, nnx.to_pure_dict(grads[0]), grads[1], layer.router.correction_bias[...]


def inputs(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def set_bias(layer, bias):
    old = layer.router.correction_bias[...]
    layer.router.correction_bias[...] = jax.device_put(jnp.asarray(bias, jnp.float32), old.sharding)


@functools.cache
def expected(shape):
    """The one-device results of each routing."""
    results = {}
    for name, bias in BIASES.items():
        layer = make_layer()
        set_bias(layer, bias)
        results[name] = step(layer, inputs(*shape))
    return results


def assert_close(out, wanted, bound=1e-5):
    def check(path, a, b):
        a, b = np.asarray(jax.device_get(a), np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error <= bound or np.linalg.norm(b) == np.linalg.norm(a) == 0, (
            f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"
        )

    jax.tree_util.tree_map_with_path(check, out, wanted)


def cases():
    """The default suite has one of each mesh: the slower one has all."""
    default = (
        ("expert8", "all_to_all", AxisType.Auto),
        ("data2-expert4", "all_to_all", AxisType.Explicit),
        ("data2-expert2-tensor2", "all_gather", AxisType.Auto),
        ("fsdp2-expert4", "none", AxisType.Auto),
    )
    found = []
    for name in MESHES:
        for strategy in ("none", "all_gather", "all_to_all"):
            for kind in (AxisType.Auto, AxisType.Explicit):
                for shape in ((2, 11, 16), (16, 16)):  # 22 tokens do not divide over 4 or 8
                    main = len(shape) == 3 and (name, strategy, kind) in default
                    found.append(
                        pytest.param(
                            name,
                            strategy,
                            kind,
                            shape,
                            id=f"{name}-{strategy}-{kind.name}-{len(shape)}d",
                            marks=() if main else pytest.mark.slow,
                        )
                    )
    return found


@pytest.mark.parametrize(("name", "strategy", "kind", "shape"), cases())
def test_equals_one_device(name, strategy, kind, shape):
    x, results = inputs(*shape), expected(shape)
    mesh = make_mesh(MESHES[name], kind)
    with jax.set_mesh(mesh):
        for routing, bias in BIASES.items():
            layer = make_layer(expert_parallel=strategy)
            set_bias(layer, bias)
            out = step(layer, x)
            assert_close(out, results[routing])
            for array in (out[4], out[1].tokens_per_expert, out[1].load_balancing_loss):
                first = np.asarray(array.addressable_shards[0].data)
                for shard in array.addressable_shards:  # the same on every device
                    np.testing.assert_array_equal(np.asarray(shard.data), first)


def stored(state, split):
    """PartitionSpecs under which a caller's shard_map hands the layer its parameters."""

    def spec(path, _):
        name = jax.tree_util.keystr(path)
        if not split:
            return P()
        if "wi_bias" in name:
            return P("expert", None, "tensor")
        if "wo_bias" in name:
            return P("expert")
        if "experts" in name:
            return P("expert", None, None, "tensor") if "wi" in name else P("expert", "tensor")
        if "shared" in name and "gate" not in name:
            return P(None, None, "tensor") if "wi" in name else P("tensor")
        return P()

    return jax.tree_util.tree_map_with_path(spec, state)


@pytest.mark.parametrize(
    ("kind", "x_spec", "split", "vma", "axis_names"),
    [
        slow(AxisType.Auto, P(("data", "expert")), True, True, None),
        slow(AxisType.Explicit, P(("data", "expert")), True, True, None),
        slow(AxisType.Auto, P("data"), True, True, None),
        slow(AxisType.Auto, P(("data", "expert")), False, True, None),
        slow(AxisType.Auto, P(("data", "expert")), True, False, None),
        (AxisType.Explicit, P("data"), False, True, {"data"}),
    ],
    ids=["split", "explicit", "tokens whole", "weights whole", "no vma", "partly manual"],
)
def test_inside_a_callers_shard_map(kind, x_spec, split, vma, axis_names):
    layer, x = make_layer(), inputs(16, 16)
    graph, state = nnx.split(layer)
    want_y, want_aux = layer(x, return_aux=True)
    want_grads = jax.grad(lambda s: jnp.sum(jnp.sin(nnx.merge(graph, s)(x))))(state)
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2}, kind)
    specs = stored(state, split)
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            lambda s, x: nnx.merge(graph, s)(x, return_aux=True),
            in_specs=(specs, x_spec),
            out_specs=(x_spec, P()),
            check_vma=vma,
            **({"axis_names": axis_names} if axis_names else {}),
        )
        x = jax.device_put(x, NamedSharding(mesh, x_spec))
        state = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), state, specs)
        y, aux = jax.jit(run)(state, x)
        grads = jax.jit(jax.grad(lambda s: jnp.sum(jnp.sin(run(s, x)[0]))))(state)
    assert_close((y, aux, grads), (want_y, want_aux, want_grads))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_of_the_layer_without_one_in_scope(kind):
    mesh = make_mesh({"expert": 4, "data": 2}, kind)
    layer, x = make_layer(mesh=mesh), inputs(5, 16)
    assert layer.experts.wi[...].sharding.spec == P("expert", None, None, None)
    assert_close(layer(x), make_layer()(x))


@pytest.mark.parametrize(
    ("kind", "manual"),
    [
        slow(AxisType.Explicit, False),
        slow(AxisType.Auto, False),
        slow(AxisType.Auto, True),
        slow(AxisType.Explicit, True),
    ],
    ids=["explicit", "auto", "auto in shard_map", "explicit in shard_map"],
)
def test_the_router_may_see_something_else(kind, manual):
    x, seen = inputs(11, 2, 16), jax.random.normal(jax.random.key(2), (11, 2, 16))
    if manual:  # a caller's shard_map must divide
        x, seen = x[:8], seen[:8]

    def grads(run):
        def loss(state, x, seen):
            y = run(state, x, seen)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    def call(state, x, seen):
        return nnx.merge(graph, state)(x, router_inputs=seen)

    graph, state = nnx.split(make_layer())
    want = grads(call)(state, x, seen)
    mesh = make_mesh({"data": 2, "expert": 4}, kind)
    with jax.set_mesh(mesh):
        run = call
        if manual:
            tokens = P(("data", "expert"))
            specs = stored(state, split=False)
            run = jax.shard_map(call, in_specs=(specs, tokens, tokens), out_specs=tokens)
            x, seen = (jax.device_put(v, NamedSharding(mesh, tokens)) for v in (x, seen))
        state = jax.device_put(state, NamedSharding(mesh, P()))
        out = grads(run)(state, x, seen)
    assert_close(out, want)


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_axes_the_rules_do_not_name(kind):
    mesh = make_mesh({"context": 2, "expert": 2, "data": 2}, kind)
    x = inputs(4, 4, 16)
    with jax.set_mesh(mesh):
        layer = make_layer()
        out = nnx.jit(lambda m, x: m(x))(
            layer, jax.device_put(x, NamedSharding(mesh, P("data", "context")))
        )
    assert_close(out, make_layer()(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_other_axes_alone(kind):
    mesh = make_mesh({"context": 8}, kind)
    x = inputs(8, 4, 16)
    with jax.set_mesh(mesh):
        layer = make_layer()
        x_split = jax.device_put(x, NamedSharding(mesh, P("context")))
        out = nnx.jit(lambda m, x: m(x))(layer, x_split)
    assert_close(out, make_layer()(x))


def test_a_split_layer_with_rules_is_static_under_jit():
    mesh = make_mesh({"x": 8}, AxisType.Auto)
    layer, x = make_layer(mesh=mesh, rules={"expert": ["x"], "tokens": "x"}), inputs(8, 16)
    graph, state = nnx.split(layer)
    run = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)
    assert_close(run(graph, state, x), make_layer()(x))


def test_rules_put_experts_on_several_axes():
    mesh = make_mesh({"x": 2, "y": 4}, AxisType.Auto)
    rules = {"expert": ("x", "y"), "tokens": ("x", "y")}
    layer, x = make_layer(mesh=mesh, rules=rules), inputs(16, 16)
    assert layer.experts.wi[...].sharding.spec == P(("x", "y"), None, None, None)
    assert_close(nnx.jit(lambda m, x: m(x))(layer, x), make_layer()(x))


def test_capacity_drops_the_same_tokens_on_any_mesh():
    config = RouterConfig(capacity_factor=0.7)
    x = inputs(24, 16)
    one = MoE(16, 12, 8, 2, router=config, rngs=nnx.Rngs(0))
    mesh = make_mesh({"data": 2, "expert": 4}, AxisType.Auto)
    many = MoE(16, 12, 8, 2, router=config, mesh=mesh, rngs=nnx.Rngs(0))
    (y, aux), (want, want_aux) = many(x, return_aux=True), one(x, return_aux=True)
    assert float(want_aux.dropped_fraction) > 0.05
    assert_close((y, aux), (want, want_aux))


def test_tokens_split_over_part_of_the_experts_axes():
    mesh = make_mesh({"x": 2, "y": 4}, AxisType.Auto)
    rules = {"expert": ("x", "y"), "tokens": ("x",)}
    layer = make_layer(mesh=mesh, rules=rules)
    with pytest.raises(ValueError, match="all of the experts' axes must split the tokens too"):
        layer(inputs(16, 16))

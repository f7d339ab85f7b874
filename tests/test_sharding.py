"""Which part of a parameter each device holds, and what cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_flax import MoE, RouterConfig, SharedConfig
from moe_flax.parameters import parameter_shapes
from moe_flax.sharding import LOGICAL_AXES, resolve_axes


def mesh(*, kind=AxisType.Auto, **sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def test_default_rules_take_what_the_mesh_has():
    axes = resolve_axes(mesh(data=2, tensor=2, expert=4, fsdp=1, other=3))
    assert (axes.expert, axes.embed, axes.mlp) == (("expert",), (), ("tensor",))
    assert axes.tokens == ("data", "expert")
    assert axes.spec("experts.wi", (8, 2, 6, 10)) == P("expert", None, None, "tensor")
    assert axes.spec("experts.wo", (8, 10, 6)) == P("expert", "tensor", None)


def test_rules_of_the_caller_in_both_forms():
    m = mesh(x=2, y=2, z=2)
    rules = {"expert": ("x", "y"), "mlp": "z", "tokens": ("x", "y"), "embed": None}
    for form in (rules, list(rules.items())):
        axes = resolve_axes(m, form)
        assert axes.spec("experts.wi", (4, 2, 6, 10)) == P(("x", "y"), None, None, "z")


def test_every_parameter_has_logical_axes():
    layer = MoE(
        16,
        8,
        4,
        2,
        use_bias=True,
        router=RouterConfig(
            score="sigmoid", correction_bias=True, logit_bias=True, per_expert_scale=True
        ),
        shared=SharedConfig(8, combine="gated"),
        latent_features=12,
        rngs=nnx.Rngs(0),
    )
    shapes = parameter_shapes(layer.config)
    assert set(shapes) == set(LOGICAL_AXES)
    leaves = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(layer))}
    assert {name: leaf.shape for name, leaf in leaves.items()} == shapes
    assert all(len(LOGICAL_AXES[name]) == len(shape) for name, shape in shapes.items())


@pytest.mark.parametrize(
    ("sizes", "rules", "message"),
    [
        ({"expert": 2}, {"experts": "expert"}, "unknown logical axis 'experts'.*'expert'.*'mlp'"),
        ({"expert": 2}, {"mlp": "model"}, r"'mlp' -> \('model',\): no mesh axis.*'expert': 2"),
        ({"x": 2}, {"expert": "x", "mlp": "x"}, "experts.wi: mesh axis.*'x'.*'expert' and 'mlp'"),
        ({"x": 2}, {"mlp": "x", "tokens": "x"}, "tokens and experts.wi.*'x'"),
        ({"x": 2}, {"expert": ("x", "x")}, "one mesh axis twice"),
        ({"x": 2}, [("mlp", "x"), ("mlp", None)], "logical axis 'mlp' twice"),
    ],
)
def test_bad_rules(sizes, rules, message):
    with pytest.raises(ValueError, match=message):
        resolve_axes(mesh(**sizes), rules)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert": 3}, r"experts.wi of shape \(8, 2, 16, 24\): dimension 0.*size 8.*'expert': 3"),
        ({"tensor": 5}, r"experts.wi.*dimension 3 \(mlp\) of size 24.*'tensor': 5"),
        ({"fsdp": 7}, r"router.kernel.*dimension 0 \(embed\) of size 16.*'fsdp': 7"),
    ],
)
def test_sizes_that_do_not_divide(sizes, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: MoE(16, 24, 8, 2, mesh=mesh(**sizes), rngs=nnx.Rngs(0)))


def test_parameters_are_made_where_they_live():
    devices = jax.make_mesh(
        (2, 2, 2), ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    layer = MoE(16, 24, 8, 2, mesh=devices, rngs=nnx.Rngs(0))
    whole = MoE(16, 24, 8, 2, rngs=nnx.Rngs(0))
    assert layer.experts.wi[...].sharding.spec == P("expert", None, "fsdp", "tensor")
    assert {s.data.shape for s in layer.experts.wi[...].addressable_shards} == {(4, 2, 8, 12)}
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(whole)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_metadata_serves_flax_sharding_tools():
    devices = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(devices):
        abstract = nnx.eval_shape(lambda: MoE(16, 24, 8, 2, rngs=nnx.Rngs(0)))
    specs = nnx.get_partition_spec(nnx.state(abstract))
    assert specs["experts"]["wi"].get_value() == P("expert", None, None, "tensor")
    unplaced = MoE(16, 24, 8, 2, rngs=nnx.Rngs(0))
    specs = nnx.get_partition_spec(nnx.state(unplaced))
    assert specs["experts"]["wo"].get_value() == P("expert", "tensor", "fsdp")


def test_made_under_jit_and_vmap():
    devices = jax.make_mesh((4, 2), ("expert", "tensor"))
    with jax.set_mesh(devices):
        layer = nnx.jit(lambda: MoE(16, 24, 8, 2, rngs=nnx.Rngs(0)))()
        assert layer.experts.wi[...].sharding.spec == P("expert", None, None, "tensor")

    @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs):
        return MoE(16, 24, 8, 2, rngs=rngs)

    stack = create(nnx.Rngs(0).split(3))
    assert stack.experts.wo.shape == (3, 8, 24, 16)
    assert stack.experts.wo.get_metadata("out_sharding") == ("layers", "expert", "mlp", "embed")
    assert bool(jnp.isfinite(stack.experts.wo[...]).all())


def test_the_layers_mesh_and_the_one_in_scope_must_have_the_same_axes():
    one = jax.make_mesh((2, 4), ("data", "expert"))
    other = jax.make_mesh((4, 2), ("expert", "tensor"))
    layer = nnx.eval_shape(lambda: MoE(16, 8, 4, 2, mesh=one, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    message = r"layer's mesh has axes \{'data': 2, 'expert': 4\}.*\{'expert': 4, 'tensor': 2\}"
    with jax.set_mesh(other), pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda m, x: m(x), layer, x)
    auto = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(auto), pytest.raises(ValueError, match=r"Explicit.*Auto"):
        nnx.eval_shape(lambda m, x: m(x), layer, x)
    with jax.set_mesh(one):
        assert nnx.eval_shape(lambda m, x: m(x), layer, x).shape == (4, 16)

"""Saved sharded with Orbax, restored onto another mesh: the same bits, where they belong."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

from moe_flax import MoE, MoEConfig


def layer_on(mesh):
    config = MoEConfig.preset("tiny")
    return MoE.from_config(config, mesh=mesh, rngs=nnx.Rngs(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restore_onto_another_mesh(tmp_path, kind):
    first = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    second = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(kind,) * 3)
    saved = nnx.state(layer_on(first))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", saved)

    layer = layer_on(second)
    graph, state = nnx.split(layer)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "layer", abstract)
    layer = nnx.merge(graph, restored)
    for ours, theirs, place in zip(*map(jax.tree.leaves, (restored, saved, state)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert ours.sharding == place.sharding
    x = jax.random.normal(jax.random.key(0), (8, layer.config.features))
    with jax.set_mesh(second):
        np.testing.assert_allclose(
            nnx.jit(lambda m, x: m(x))(layer, x), layer_on(None)(x), atol=1e-5
        )

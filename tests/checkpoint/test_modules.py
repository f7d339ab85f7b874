"""Parameters into layers: each variable written once, each device's part where the rules put it."""

import collections

import jax
import numpy as np
import pytest
from golden import FIXTURES, fixture
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_flax import checkpoint
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.mapping import ArrayParameter, read
from moe_flax.checkpoint.modules import build_moe, named_variables
from moe_flax.checkpoint.source import open_source


class Counted:
    """A parameter that counts how often each of its elements is read."""

    def __init__(self, parameter):
        self.parameter, self.shape, self.dtype = parameter, parameter.shape, parameter.dtype
        self.reads = np.zeros(self.shape, int)

    def read_into(self, out, index):
        self.reads[index] += 1
        self.parameter.read_into(out, index)


def counted(name, index=0):
    source = open_source(FIXTURES / name)
    parameters = {key: Counted(value) for key, value in source.parameters(index).items()}
    return source.layers[index].config, parameters


@pytest.mark.parametrize("name", ["mixtral-plain", "mixtral-double", "gpt_oss-plain"])
def test_every_variable_is_written_from_the_files_and_read_once(name):
    config, parameters = counted(name)
    built = dict(named_variables(build_moe(config, parameters)))
    assert set(built) == set(parameters)
    for key, parameter in parameters.items():
        np.testing.assert_array_equal(built[key][...], read(parameter.parameter), err_msg=key)
        assert (parameter.reads == 1).all(), key


@pytest.mark.parametrize("form", ["per_expert", "fused"])
def test_stacked_and_single_experts_fill_the_same_variables(tmp_path, form):
    """Public converters have left all experts at their initial values where names changed."""
    tensors, _ = fixture("mixtral-plain")
    checkpoint.save(tmp_path / "m", checkpoint.load(FIXTURES / "mixtral-plain"), form=form)
    layer = checkpoint.load_layer(tmp_path / "m", 1)
    for e in range(12):
        block = f"model.layers.1.block_sparse_moe.experts.{e}."
        for j, name in enumerate(("w1", "w3")):
            np.testing.assert_array_equal(
                layer.experts.wi[...][e, j].T, tensors[f"{block}{name}.weight"]
            )
        np.testing.assert_array_equal(layer.experts.wo[...][e].T, tensors[f"{block}w2.weight"])


def test_a_parameter_too_few_too_many_or_of_another_shape():
    config, parameters = counted("gpt_oss-plain")
    lost = {k: v for k, v in parameters.items() if k != "experts.wo_bias"}
    with pytest.raises(CheckpointError, match=r"\['experts\.wo_bias'\] are in the layer or the"):
        build_moe(config, lost)
    with pytest.raises(CheckpointError, match=r"\['shared\.wi'\] are in the layer or the files"):
        build_moe(config, parameters | {"shared.wi": ArrayParameter(np.zeros((2, 16, 8)))})
    wrong = ArrayParameter(np.zeros((12, 8)))
    with pytest.raises(CheckpointError, match=r"experts\.wo_bias has shape \(12, 8\), the layer's"):
        build_moe(config, parameters | {"experts.wo_bias": wrong})


MESHES = {
    "expert4-data2": {"expert": 4, "data": 2},
    "fsdp2-expert4": {"fsdp": 2, "expert": 4},
    "expert2-tensor2-data2": {"expert": 2, "tensor": 2, "data": 2},
}
SPECS = {  # parameter: logical axes
    "router.kernel": ("fsdp", None),
    "router.bias": (None,),
    "experts.wi": ("expert", None, "fsdp", "tensor"),
    "experts.wi_bias": ("expert", None, "tensor"),
    "experts.wo": ("expert", "tensor", "fsdp"),
    "experts.wo_bias": ("expert", "fsdp"),
    "shared.wi": (None, "fsdp", "tensor"),
    "shared.wo": ("tensor", "fsdp"),
    "shared.gate": ("fsdp", None),
}


@pytest.mark.parametrize("name", ["qwen2_moe-plain", "gpt_oss-plain"])
@pytest.mark.parametrize("sizes", MESHES)
def test_load_onto_a_mesh(sizes, name):
    kind = AxisType.Explicit if sizes == "fsdp2-expert4" else AxisType.Auto
    axes = MESHES[sizes]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    loaded = checkpoint.load(FIXTURES / name, mesh=mesh)
    plain = checkpoint.load(FIXTURES / name)
    assert set(loaded.layers) == set(plain.layers)
    for index, layer in loaded.layers.items():
        expected = dict(named_variables(plain.layers[index]))
        for key, variable in named_variables(layer):
            array = variable[...]
            spec = P(*(a if a in axes else None for a in SPECS[key]))
            assert array.sharding.mesh == mesh
            assert array.sharding.spec == spec, key
            value = np.asarray(expected[key][...])
            np.testing.assert_array_equal(np.asarray(array), value, err_msg=key)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_reads_every_element_once(sizes):
    """Also where several devices hold the same part."""
    axes = MESHES[sizes]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    config, parameters = counted("gpt_oss-plain")
    build_moe(config, parameters, mesh=mesh)
    reads = {k: collections.Counter(p.reads.ravel().tolist()) for k, p in parameters.items()}
    assert all(set(found) == {1} for found in reads.values()), reads

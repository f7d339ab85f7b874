"""Which tensor is which parameter: every mistake in the keys is an error that names it."""

import numpy as np
import pytest
from golden import FAMILIES, FIXTURES, fixture, write

from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.mapping import ArrayParameter, read, stored_chunks
from moe_flax.checkpoint.source import Source, open_source

QWEN = "model.layers.0.mlp."


def changed(name="qwen3_moe-plain", drop=(), add=None, **config):
    """A fixture's Source after tensors were dropped or added, or the configuration changed."""
    tensors, values = fixture(name)
    tensors = {k: v for k, v in tensors.items() if k not in drop} | (add or {})
    return Source(tensors, {**values, **config}, file="here")


def test_every_tensor_is_a_parameter_or_passed_through():
    for name in [f"{family}-plain" for family in FAMILIES]:
        source = open_source(FIXTURES / name)
        taken = [key for layer in source.layers.values() for key in layer.keys]
        assert sorted([*taken, *source.rest]) == sorted(source.tensors), name
        assert not any(".experts." in k and "self_attention" not in k for k in source.rest), name


def test_experts_are_ordered_by_number():
    tensors, _ = fixture("qwen3_moe-plain")
    wi = read(changed().parameters(0)["experts.wi"])
    for e in (1, 2, 9, 10, 11):
        np.testing.assert_array_equal(wi[e, 0].T, tensors[f"{QWEN}experts.{e}.gate_proj.weight"])
        np.testing.assert_array_equal(wi[e, 1].T, tensors[f"{QWEN}experts.{e}.up_proj.weight"])


def test_part_of_a_parameter_is_that_part():
    for name in ("qwen3_moe-plain", "qwen3_moe-double"):
        wi = changed(name).parameters(0)["experts.wi"]
        index = (slice(2, 11), slice(1, 2), slice(4, 12), slice(0, 5))
        np.testing.assert_array_equal(read(wi, index), read(wi)[index])


@pytest.mark.parametrize(
    "key", ["experts.11.up_proj.weight", "gate.weight", "experts.3.down_proj.weight"]
)
def test_missing_tensor(key):
    with pytest.raises(CheckpointError, match=f"here: tensor '{QWEN}{key}': missing from layer 0"):
        changed(drop=[QWEN + key])


def test_missing_expert_names_the_first_of_its_tensors():
    keys = [f"{QWEN}experts.7.{n}_proj.weight" for n in ("gate", "up", "down")]
    with pytest.raises(CheckpointError, match=r"experts\.7\.down_proj.*missing.*\(and 2 more\)"):
        changed(drop=keys)


@pytest.mark.parametrize(
    "key",
    [
        "experts.12.up_proj.weight",
        "experts.01.up_proj.weight",
        "experts.0.up_proj.bias",
        "gate.bias",
    ],
)
def test_extra_tensor(key):
    extra = {QWEN + key: np.zeros(2, np.float32)}
    with pytest.raises(CheckpointError, match=f"tensor '{QWEN}{key}': belongs to no parameter"):
        changed(add=extra)


def test_both_forms_in_one_checkpoint():
    fused = {f"{QWEN}experts.gate_up_proj": np.zeros((12, 24, 16), np.float32)}
    with pytest.raises(CheckpointError, match="layer 0 holds its experts in two forms"):
        changed(add=fused)


def test_one_layer_under_two_prefixes():
    tensors, _ = fixture("qwen3_moe-plain")
    twice = {"model.language_" + k: v for k, v in tensors.items() if k.startswith("model.layers.0")}
    with pytest.raises(CheckpointError, match="layer 0 is there twice"):
        changed(add=twice)


def test_layer_without_experts():
    tensors, _ = fixture("qwen3_moe-plain")
    with pytest.raises(CheckpointError, match=r"layer 2 has no expert tensors; expected such as"):
        changed(drop=[k for k in tensors if k.startswith("model.layers.2.mlp.")])


def test_dense_layer_with_experts():
    with pytest.raises(
        CheckpointError, match=r"layer 0 holds experts, config\.json makes it dense"
    ):
        changed(mlp_only_layers=[0, 1])


def test_wrong_shape():
    wrong = {f"{QWEN}experts.0.up_proj.weight": np.zeros((12, 8), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"has shape \(12, 8\), config\.json makes it \(8, 12\)"
    ):
        changed(add=wrong)


def test_layers_past_the_last_are_reported_and_pass_through():
    tensors, _ = fixture("qwen3_moe-plain")
    mtp = {k.replace("layers.2", "layers.3"): v for k, v in tensors.items() if "layers.2." in k}
    source = changed(add=mtp)
    assert source.beyond == [3]
    assert tuple(source.layers) == (0, 2)
    assert set(mtp) <= set(source.rest)


def test_multimodal_prefix():
    tensors, config = fixture("qwen3_moe-plain")
    moved = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    assert tuple(Source(moved, config).layers) == (0, 2)


def test_unknown_form_and_layer():
    with pytest.raises(CheckpointError, match="no form 'gguf'; it has per_expert, fused"):
        open_source(FIXTURES / "qwen3_moe-plain", form="gguf")
    with pytest.raises(CheckpointError, match=r"layer 1 is no MoE layer; those are \(0, 2\)"):
        open_source(FIXTURES / "qwen3_moe-plain").layer(1)


@pytest.mark.parametrize("name", [f"{f}-{c}" for f in FAMILIES for c in ("plain", "double")])
def test_stored_tensors_come_back_from_parameters(name):
    if not (FIXTURES / name).exists():
        name = name.replace("double", "square")
    source = open_source(FIXTURES / name)
    for index, layer in source.layers.items():
        for parameter, stored in source.parameters(index).items():
            array = ArrayParameter(read(stored))
            for key in layer.bindings[parameter].keys:
                original = source.tensors[key]
                chunks = list(stored_chunks(layer.bindings[parameter], key, array, original.dtype))
                got = np.concatenate([chunk.reshape(-1) for chunk in chunks])
                np.testing.assert_array_equal(got, original.reshape(-1))


def test_write_helper_deals_over_shards(tmp_path):
    tensors, config = fixture("mixtral-plain")
    assert set(open_source(write(tmp_path / "m", tensors, config, shards=5)).tensors) == set(
        tensors
    )

"""load_layer, load and save on whole checkpoints, against the files that transformers wrote."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden import (
    FAMILIES,
    FIXTURES,
    NAMES,
    config_of,
    fixture,
    golden_of,
    relative_error,
    router_inputs_of,
    tensors_of,
    write,
)

import moe_flax
from moe_flax import checkpoint
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.mapping import ArrayParameter, parameter_shapes
from moe_flax.checkpoint.modules import build_moe, named_variables

BF16 = ml_dtypes.bfloat16
DISTINCT = {  # families whose layers differ from one another in more than names
    "mixtral", "qwen2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "longcat_flash",
    "gpt_oss", "llama4", "jetmoe", "cohere2_moe", "nemotron_h", "minimax_m3", "step3p7",
    "deepseek_v4", "phimoe", "nllb_moe", "gemma4",
}  # fmt: skip


def run(layer, x, router_inputs=None):
    """The layer's output; the plain backend compiles in the least time."""
    layer.backend = "reference"
    return nnx.jit(lambda layer, x, seen: layer(x, router_inputs=seen))(layer, x, router_inputs)


def assert_same_files(path, tensors, config):
    """The directory holds exactly these tensors, dtypes included, and this configuration."""
    saved = tensors_of(path)
    assert set(saved) == set(tensors)
    for name, value in tensors.items():
        assert saved[name].dtype == value.dtype, name
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert config_of(path) == config


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in DISTINCT else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_the_layer_computes_what_transformers_computes(family):
    path = FIXTURES / f"{family}-plain"
    inputs, outputs = golden_of(path)
    index = next(iter(outputs))
    layer = checkpoint.load_layer(path, index)
    assert isinstance(layer, moe_flax.MoE)
    got = run(layer, inputs, router_inputs_of(path))
    assert relative_error(got, outputs[index]) < 1e-5


def test_gemma4s_router_sees_something_else():
    """As the family's note says it: rms_norm(x) * router.scale / sqrt(D)."""
    path = FIXTURES / "gemma4-plain"
    loaded = checkpoint.load(path)
    seen = router_inputs_of(path)
    scale = loaded.rest["model.language_model.layers.0.router.scale"]
    x = seen / (scale * seen.shape[-1] ** -0.5)  # the norm has taken the length of x away
    np.testing.assert_allclose(np.square(x).mean(-1), 1, rtol=1e-3)
    inputs, outputs = golden_of(path)
    assert relative_error(run(loaded.layers[0], inputs, seen), outputs[0]) < 1e-5
    assert relative_error(run(loaded.layers[0], inputs), outputs[0]) > 0.1


@pytest.mark.parametrize("name", [name for name in NAMES if "plain" in name])
def test_save_gives_back_what_was_loaded(tmp_path, name):
    loaded = checkpoint.load(FIXTURES / name)
    checkpoint.save(tmp_path / "m", loaded)
    assert_same_files(tmp_path / "m", *fixture(name))


def test_save_gives_back_bfloat16_and_shards(tmp_path):
    tensors, config = fixture("qwen3_moe-plain")
    tensors = {k: v.astype(BF16) for k, v in tensors.items()}
    source = write(tmp_path / "source", tensors, config)
    loaded = checkpoint.load(source)
    assert loaded.layers[0].experts.wi.dtype == jnp.bfloat16
    assert loaded.layers[0].router.kernel.dtype == jnp.float32
    checkpoint.save(tmp_path / "m", loaded, shard_bytes=3_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    assert_same_files(tmp_path / "m", tensors, config)


def test_a_trained_router_is_not_rounded(tmp_path):
    tensors, config = fixture("qwen3_moe-plain")
    source = write(tmp_path / "s", {k: v.astype(BF16) for k, v in tensors.items()}, config)
    loaded = checkpoint.load(source)
    kernel = loaded.layers[0].router.kernel
    kernel[...] = kernel[...] + jnp.float32(2**-14)
    checkpoint.save(tmp_path / "m", loaded)
    saved = tensors_of(tmp_path / "m")
    assert saved["model.layers.0.mlp.gate.weight"].dtype == np.float32
    assert saved["model.layers.2.mlp.gate.weight"].dtype == BF16
    np.testing.assert_array_equal(saved["model.layers.0.mlp.gate.weight"].T, kernel[...])


@pytest.mark.parametrize("name", ["mixtral-plain", "mixtral-double"])
def test_dtype_casts_the_experts_and_never_the_router(tmp_path, name):
    layer = checkpoint.load_layer(FIXTURES / name, 0, dtype=jnp.bfloat16)
    dtypes = {key: variable.dtype for key, variable in named_variables(layer)}
    assert dtypes.pop("router.kernel") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
    loaded = checkpoint.load(FIXTURES / name, dtype=jnp.bfloat16)
    checkpoint.save(tmp_path / "m", loaded)
    saved = tensors_of(tmp_path / "m")
    wanted = {k: v.dtype for k, v in saved.items() if "expert" in k or "gate" in k}
    assert {v for k, v in wanted.items() if "expert" in k} == {np.dtype(BF16)}
    assert {v for k, v in wanted.items() if "expert" not in k} == {np.dtype(np.float32)}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_one_form_written_as_the_other_loads_the_same(tmp_path, family):
    loaded = checkpoint.load(FIXTURES / f"{family}-plain")
    checkpoint.save(tmp_path / "fused", loaded, form="fused")
    names = set(tensors_of(tmp_path / "fused"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    again = checkpoint.load(tmp_path / "fused")
    checkpoint.save(tmp_path / "per_expert", again, form="per_expert")
    assert_same_files(tmp_path / "per_expert", *fixture(f"{family}-plain"))


def test_a_model_made_here_becomes_a_mixtral_directory(tmp_path):
    config = moe_flax.MoEConfig(
        features=16,
        hidden_features=8,
        num_experts=12,
        num_experts_per_token=2,
        num_layers=2,
        moe_layers=(0, 1),
    )
    rng = np.random.default_rng(0)
    values = {
        name: ArrayParameter(rng.normal(size=shape).astype(np.float32))
        for name, shape in parameter_shapes(config).items()
    }
    layers = {i: build_moe(config, values) for i in range(2)}
    rest = {"model.norm.weight": np.ones(16, np.float32)}
    made = checkpoint.Checkpoint(config, layers, rest)
    checkpoint.save(tmp_path / "m", made, family="mixtral")
    again = checkpoint.load(tmp_path / "m")
    assert again.config.family == "mixtral"
    assert dict(again.rest).keys() == rest.keys()
    for i, layer in layers.items():
        for (name, mine), (_, loaded) in zip(
            named_variables(layer), named_variables(again.layers[i]), strict=True
        ):
            np.testing.assert_array_equal(mine[...], loaded[...], err_msg=name)


def test_another_family_with_the_same_layer(tmp_path):
    loaded = checkpoint.load(FIXTURES / "mixtral-plain")
    checkpoint.save(tmp_path / "m", loaded, family="qwen3_moe")
    again = checkpoint.load(tmp_path / "m")
    assert again.config.family == "qwen3_moe"
    assert again.config.router.renormalize
    inputs, outputs = golden_of(FIXTURES / "mixtral-plain")
    assert relative_error(run(again.layers[1], inputs), outputs[1]) < 1e-5


def test_one_stored_bias_must_be_that_of_all_experts(tmp_path):
    """JetMoE stores one bias for a block: experts that differ in theirs do not fit."""
    loaded = checkpoint.load(FIXTURES / "jetmoe-plain")
    bias = loaded.layers[0].experts.wo_bias
    bias[...] = bias[...].at[jnp.array([3, 7])].add(1.0)
    with pytest.raises(CheckpointError, match=r"layer 0: .*one experts\.wo_bias.*\[3, 7\] differ"):
        checkpoint.save(tmp_path / "m", loaded)
    loaded = checkpoint.load(FIXTURES / "jetmoe-plain")
    bias = loaded.layers[1].experts.wi_bias
    bias[...] = bias[...].at[2, 0, 1].set(0.5)
    with pytest.raises(CheckpointError, match=r"layer 1: experts\.wi_bias is not zero.*no place"):
        checkpoint.save(tmp_path / "m", loaded)
    assert not list(tmp_path.iterdir())


def test_23_a_head_that_is_the_embedding(tmp_path):
    """Tied: no head on disk, none invented. Not tied: a head that is missing is an error."""
    tensors, config = fixture("jetmoe-plain")
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in tensors
    checkpoint.save(tmp_path / "tied", checkpoint.load(FIXTURES / "jetmoe-plain"))
    assert_same_files(tmp_path / "tied", tensors, config)

    tensors, config = fixture("mixtral-plain")
    assert config["tie_word_embeddings"] is False
    headless = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    path = write(tmp_path / "lost", headless, config)
    with pytest.raises(CheckpointError, match=f"{path}: .*tie_word_embeddings=False.*no lm_head"):
        checkpoint.load(path)
    checkpoint.load_layer(path, 0)
    body = {**config, "architectures": ["MixtralModel"]}
    checkpoint.load(write(tmp_path / "body", headless, body))
    tied = write(tmp_path / "tied2", headless, {**config, "tie_word_embeddings": True})
    loaded = checkpoint.load(tied)
    checkpoint.save(tmp_path / "other", loaded, family="qwen3_moe")
    assert config_of(tmp_path / "other")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors_of(tmp_path / "other")
    whole = checkpoint.load(FIXTURES / "mixtral-plain")
    checkpoint.save(tmp_path / "third", whole, family="qwen3_moe")
    assert config_of(tmp_path / "third")["tie_word_embeddings"] is False
    assert "lm_head.weight" in tensors_of(tmp_path / "third")


def test_quantized_is_one_of_two():
    for load in (checkpoint.load, lambda path, **k: checkpoint.load_layer(path, 0, **k)):
        with pytest.raises(ValueError, match="must be 'dequantize' or 'keep', got 'kept'"):
            load(FIXTURES / "mixtral-plain", quantized="kept")


def test_rest_is_mapped_and_complete():
    loaded = checkpoint.load(FIXTURES / "qwen3_moe-plain")
    tensors, _ = fixture("qwen3_moe-plain")
    assert "model.layers.1.mlp.gate_proj.weight" in loaded.rest
    assert "model.layers.0.mlp.gate.weight" not in loaded.rest
    with pytest.raises(KeyError):
        loaded.rest["model.layers.0.mlp.gate.weight"]
    for name, value in loaded.rest.items():
        assert not value.flags.owndata
        np.testing.assert_array_equal(value, tensors[name])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_parameters_arrive_in_the_meshs_shardings(kind):
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(types[kind],))
    layer = checkpoint.load_layer(FIXTURES / "mixtral-plain", 0, mesh=mesh)
    plain = checkpoint.load_layer(FIXTURES / "mixtral-plain", 0)
    for (name, variable), (_, expected) in zip(
        named_variables(layer), named_variables(plain), strict=True
    ):
        assert variable[...].sharding.mesh == mesh, name
        np.testing.assert_array_equal(variable[...], expected[...])


def test_gradients_reach_a_loaded_layer():
    layer = checkpoint.load_layer(FIXTURES / "mixtral-plain", 0)
    layer.backend = "reference"
    inputs, _ = golden_of(FIXTURES / "mixtral-plain")
    gradients = nnx.jit(nnx.grad(lambda m: (m(inputs) ** 2).sum()))(layer)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(gradients))


def test_errors_name_file_and_tensor(tmp_path):
    tensors, config = fixture("mixtral-plain")
    lost = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    path = write(tmp_path / "m", {k: v for k, v in tensors.items() if k != lost}, config)
    with pytest.raises(CheckpointError, match=f"{path}: tensor '{lost}': missing from layer 1"):
        checkpoint.load(path)
    checkpoint.load_layer(path, 0)
    with pytest.raises(CheckpointError, match=f"tensor '{lost}'"):
        checkpoint.load_layer(path, 1)
    with pytest.raises(ValueError, match="quantized must be 'dequantize' or 'keep'"):
        checkpoint.load(path, quantized="no")  # pyright: ignore[reportArgumentType]
    (path / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    with pytest.raises(CheckpointError, match="'rwkv' is not known"):
        checkpoint.load(path)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        checkpoint.load(path)


def test_save_refuses_what_does_not_fit(tmp_path):
    loaded = checkpoint.load(FIXTURES / "mixtral-plain")
    with pytest.raises(CheckpointError, match="'llama' is not known"):
        checkpoint.save(tmp_path / "m", loaded, family="llama")
    with pytest.raises(CheckpointError, match="has no form 'flat'; it has per_expert, fused"):
        checkpoint.save(tmp_path / "m", loaded, form="flat")
    loaded.rest = {"model.layers.0.block_sparse_moe.gate.weight": np.zeros(1)}
    with pytest.raises(CheckpointError, match=r"in \.rest and a layer's parameter"):
        checkpoint.save(tmp_path / "m", loaded)
    assert not list(tmp_path.iterdir())

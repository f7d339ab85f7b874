"""The family table: config.json to MoEConfig and back, and what it refuses."""

import json

import numpy as np
import pytest
from golden import (
    FAMILIES,
    FIXTURES,
    config_of,
    fixture,
    golden_of,
    relative_error,
    tensors_of,
    write,
)

from moe_flax import checkpoint, route
from moe_flax import config as moe_config
from moe_flax.checkpoint import families
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.hf_config import write_config
from moe_flax.checkpoint.layouts import PARAMETER_AXES, parse
from moe_flax.config import MoEConfig

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
}


def test_reads_a_dict_a_file_and_a_directory(tmp_path):
    expected = MoEConfig(
        features=4096,
        hidden_features=14336,
        num_experts=8,
        num_experts_per_token=2,
        num_layers=32,
        moe_layers=tuple(range(32)),
        family="mixtral",
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL))
    assert MoEConfig.from_hf(MIXTRAL) == expected
    assert MoEConfig.from_hf(file) == expected
    assert MoEConfig.from_hf(str(tmp_path)) == expected


def test_unknown_model_type_lists_the_known():
    with pytest.raises(ValueError, match=r"'llama' is not known; known: mixtral, .*qwen3_moe"):
        MoEConfig.from_hf({"model_type": "llama"})
    with pytest.raises(CheckpointError, match="model_type '' is not known"):
        MoEConfig.from_hf({})


@pytest.mark.parametrize("field", sorted(set(MIXTRAL) - {"model_type"}))
def test_missing_field_is_named(field):
    with pytest.raises(ValueError, match=f"no .*{field}"):
        MoEConfig.from_hf({k: v for k, v in MIXTRAL.items() if k != field})
    with pytest.raises(ValueError, match=f"no .*{field}"):
        MoEConfig.from_hf({**MIXTRAL, field: None})


def test_values_that_mean_nothing_known():
    with pytest.raises(ValueError, match="hidden_act='quick_gelu'; known"):
        MoEConfig.from_hf({**MIXTRAL, "hidden_act": "quick_gelu"})
    with pytest.raises(ValueError, match="expected a non-negative integer"):
        MoEConfig.from_hf({**MIXTRAL, "num_local_experts": "8"})
    with pytest.raises(ValueError, match="contradicts itself"):
        MoEConfig.from_hf({**MIXTRAL, "num_experts": 16})
    with pytest.raises(ValueError, match="num_experts_per_token"):
        MoEConfig.from_hf({**MIXTRAL, "num_experts_per_tok": 9})


def test_aliases_of_the_number_of_experts():
    values = {k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}
    for name in ("num_experts", "n_routed_experts", "moe_num_experts"):
        assert MoEConfig.from_hf({**values, name: 8}).num_experts == 8


def test_a_missing_field_takes_the_familys_own_default():
    qwen3 = config_of(FIXTURES / "qwen3_moe-plain")
    del qwen3["norm_topk_prob"]
    assert not MoEConfig.from_hf(qwen3).router.renormalize


RENORMALIZES = {  # without a word in config.json
    "mixtral": True, "qwen2_moe": False, "qwen3_moe": False, "qwen3_next": True, "olmoe": False,
    "flex_olmo": False, "deepseek_v2": False, "deepseek_v3": True, "deepseek_v32": True,
    "dots1": False, "glm4_moe": True, "lfm2_moe": True, "bailing_hybrid": True,
    "kimi_linear": True, "nemotron_h": True, "exaone_moe": True, "qwen3_5_moe": True,
    "hunyuan_v1_moe": True, "jamba": False, "minimax_m2": True,
}  # fmt: skip
WITHOUT_FIELD = ("mixtral", "qwen3_5_moe", "hunyuan_v1_moe", "jamba", "minimax_m2")


@pytest.mark.parametrize("family", RENORMALIZES)
def test_renormalization_with_and_without_its_field(family):
    field = "moe_renormalize" if family == "kimi_linear" else "norm_topk_prob"
    values = config_of(FIXTURES / f"{family}-plain")
    values = {k: v for k, v in values.items() if k not in ("moe_renormalize", "norm_topk_prob")}
    assert MoEConfig.from_hf(values).router.renormalize is RENORMALIZES[family]
    for given in (True, False):
        router = MoEConfig.from_hf(values | {field: given}).router
        assert router.renormalize is (RENORMALIZES[family] if family in WITHOUT_FIELD else given)


@pytest.mark.parametrize("value", ["a", float("nan"), True, [2.5], {}])
def test_a_scale_that_is_no_number(value):
    values = config_of(FIXTURES / "deepseek_v3-plain") | {"routed_scaling_factor": value}
    with pytest.raises(CheckpointError, match=r"config\.json does not describe.*scale must be"):
        MoEConfig.from_hf(values)
    with pytest.raises(CheckpointError, match="renormalize must be True or False"):
        MoEConfig.from_hf(config_of(FIXTURES / "qwen3_moe-plain") | {"norm_topk_prob": "yes"})


def test_capacities_of_switch_and_nllb():
    values = config_of(FIXTURES / "nllb_moe-plain")
    router = MoEConfig.from_hf({**values, "moe_eval_capacity_token_fraction": 0.5}).router
    assert (router.capacity_fraction, router.capacity_scope) == (0.5, "batch")
    assert router.capacity_renormalize
    assert MoEConfig.from_hf(values).router.capacity_fraction == 1
    with pytest.raises(CheckpointError, match="capacity_fraction must be positive"):
        MoEConfig.from_hf({**values, "moe_eval_capacity_token_fraction": -1.0})
    values = config_of(FIXTURES / "switch_transformers-plain")
    router = MoEConfig.from_hf({**values, "expert_capacity": 3}).router
    assert (router.expert_capacity, router.capacity_scope) == (3, "sequence")


def test_layers_by_step_and_exception():
    qwen3 = {**config_of(FIXTURES / "qwen3_moe-plain"), "num_hidden_layers": 8}
    qwen3 |= {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert MoEConfig.from_hf(qwen3).moe_layers == (1, 5, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_written_fields_read_back_the_same(family):
    config = families.config_from_hf(FIXTURES / f"{family}-plain")
    assert families.config_from_hf(write_config(families.find(config.family), config)) == config


def test_a_family_that_cannot_say_it_is_an_error():
    config = MoEConfig.from_hf({**MIXTRAL})
    config = moe_config.MoEConfig.from_dict({**config.to_dict(), "activation": "gpt_oss"})
    with pytest.raises(
        CheckpointError, match=r"family mixtral cannot express activation='gpt_oss'"
    ):
        write_config(families.find("mixtral"), config)


def test_every_row_is_sound():
    assert len(families.BY_MODEL_TYPE) == sum(len(f.model_types) for f in families.TABLE)
    for family in families.TABLE:
        names = [form.name for form in family.forms]
        assert len(set(names)) == len(names), family.name
        for form in family.forms:
            parameters = [entry.parameter for entry in form.entries]
            assert len(set(parameters)) == len(parameters), (family.name, form.name)
            for entry in form.entries:
                wanted = {a for group in parse(PARAMETER_AXES[entry.parameter]) for a in group}
                named = {a for group in parse(entry.axes) for a in group}
                named |= {a for a in "EJ" if f"{{{a}}}" in (entry.key or "")}
                assert wanted - named - {"1"} <= {"E"}, (family.name, entry)
                assert named - wanted <= {"1"}, (family.name, entry)
                assert ("{J}" in (entry.key or "")) == bool(entry.branches), (family.name, entry)


def test_nemotron_h_with_latent_experts(tmp_path):
    """The router and the shared expert see the model's width, the routed ones the latent one."""
    tensors, config = fixture("nemotron_h-plain")
    latent, width = 6, config["hidden_size"]
    rng = np.random.default_rng(0)
    found = {}
    for name, value in tensors.items():
        found[name] = value
        if ".experts." in name:
            value = value[:, :latent] if "up_proj" in name else value[:latent]
            found[name] = np.ascontiguousarray(value)
        if name.endswith("mixer.gate.weight"):
            block = name.removesuffix("gate.weight")
            for part, shape in (("fc1", (latent, width)), ("fc2", (width, latent))):
                matrix = rng.normal(size=shape).astype(np.float32)
                found[f"{block}{part}_latent_proj.weight"] = matrix
    config = {**config, "moe_latent_size": latent}
    source = write(tmp_path / "source", found, config)
    model = checkpoint.load(source)
    index, layer = next(iter(model.layers.items()))
    assert model.config.latent_features == latent
    x = rng.normal(size=(7, width)).astype(np.float32)
    block = f"backbone.layers.{index}.mixer."
    routing = route(
        layer.router(x),
        layer.config.router,
        layer.config.num_experts_per_token,
        correction_bias=layer.router.correction_bias[...],
    )
    expected = np.zeros_like(x)
    seen = x @ found[block + "fc1_latent_proj.weight"].T
    for t in range(len(x)):
        for e, weight in zip(routing.expert_ids[t], routing.weights[t], strict=True):
            part = np.maximum(found[f"{block}experts.{e}.up_proj.weight"] @ seen[t], 0) ** 2
            part = found[f"{block}experts.{e}.down_proj.weight"] @ part
            expected[t] += float(weight) * (found[block + "fc2_latent_proj.weight"] @ part)
    hidden = np.maximum(x @ found[block + "shared_experts.up_proj.weight"].T, 0) ** 2
    expected += hidden @ found[block + "shared_experts.down_proj.weight"].T
    assert relative_error(layer(x), expected) < 1e-5
    checkpoint.save(tmp_path / "saved", model)
    saved = tensors_of(tmp_path / "saved")
    assert set(saved) == set(found)
    for name, value in found.items():
        np.testing.assert_array_equal(saved[name], value)
    assert config_of(tmp_path / "saved") == config


def test_qwen3_omnis_thinker(tmp_path):
    """A Qwen3-MoE under ``thinker.``; the talker's experts, of other sizes, are passed on."""
    tensors, config = fixture("qwen3_moe-plain")
    names = {name: f"thinker.{name}" for name in tensors}
    found = {names[name]: value for name, value in tensors.items()}
    talker = "talker.model.layers.0.mlp.experts.0.up_proj.weight"
    found[talker] = np.ones((3, 5), np.float32)
    text = {key: value for key, value in config.items() if key != "architectures"}
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {**text, "model_type": "qwen3_omni_moe_text"},
        },
        "talker_config": {"model_type": "qwen3_omni_moe_talker"},
    }
    model = checkpoint.load(write(tmp_path / "source", found, config))
    inputs, outputs = golden_of(FIXTURES / "qwen3_moe-plain")
    assert set(model.layers) == set(outputs)
    index = max(outputs)
    assert relative_error(model.layers[index](inputs), outputs[index]) < 1e-5
    assert talker in model.rest
    checkpoint.save(tmp_path / "saved", model)
    assert set(tensors_of(tmp_path / "saved")) == set(found)
    assert config_of(tmp_path / "saved") == config
    assert MoEConfig.from_hf(config).family == "qwen3_omni_moe"
    del text["norm_topk_prob"]
    config["thinker_config"]["text_config"] = {**text, "model_type": "qwen3_omni_moe_text"}
    assert MoEConfig.from_hf(config).router.renormalize

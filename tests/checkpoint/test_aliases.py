"""Model types and forms that transformers itself does not write: each read, and written back.

The names and layouts are those of the public files: DeepSeek's, Meta's and OpenAI's own, Kimi-K2,
GLM-4.5V, Ling 2.0, and Llama 4 with one Linear an expert. Tensors are made here, from the values
of a fixture that transformers wrote, so that its golden outputs hold for them as well.
"""

import numpy as np
import numpy_moe
import pytest
from golden import FIXTURES, config_of, fixture, golden_of, relative_error, tensors_of, write

from moe_flax import checkpoint
from moe_flax.checkpoint.families import BY_MODEL_TYPE, TABLE, config_from_hf
from moe_flax.checkpoint.mapping import read
from moe_flax.checkpoint.source import open_source

NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
FIXTURE_OF = {}  # the fixture of a row of the table
for path in FIXTURES.glob("*-plain"):
    FIXTURE_OF[config_from_hf(path).family] = path.name
WRITTEN = {config_of(path)["model_type"] for path in FIXTURES.glob("*-plain")}
BY_HAND = {"qwen3_omni_moe"}  # rows whose test in test_families.py moves another's fixture
ALIASES = sorted(
    alias
    for alias, row in BY_MODEL_TYPE.items()
    if alias not in WRITTEN and row.name not in BY_HAND
)


def check(tmp_path, tensors, config, name, form=None):
    """Reads the tensors as the fixture's layer, compares outputs, and saves them as they were."""
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    source = open_source(write(tmp_path / "in", tensors, config))
    inputs, outputs = golden_of(FIXTURES / name)
    assert tuple(source.layers) == tuple(outputs)
    for index, expected in outputs.items():
        bound = source.layers[index]
        assert form in (None, bound.form.name)
        parameters = {key: read(value) for key, value in source.parameters(index).items()}
        got = numpy_moe.forward(parameters, bound.config, inputs)
        assert relative_error(got, expected) < 1e-5
    checkpoint.save(tmp_path / "out", checkpoint.load(tmp_path / "in"))
    saved = tensors_of(tmp_path / "out")
    assert set(saved) == set(tensors)
    for key, value in tensors.items():
        assert saved[key].dtype == value.dtype
        np.testing.assert_array_equal(saved[key], value, err_msg=key)
    assert config_of(tmp_path / "out") == config


def test_every_row_has_a_fixture():
    assert {family.name for family in TABLE} == set(FIXTURE_OF) | BY_HAND


@pytest.mark.parametrize("alias", [a for a in ALIASES if not a.startswith("gemma4")])
def test_an_alias_reads_like_its_row(tmp_path, alias):
    name = FIXTURE_OF[BY_MODEL_TYPE[alias].name]
    tensors, config = fixture(name)
    check(tmp_path, tensors, {**config, "model_type": alias}, name)


def test_kimi_k2_inside_a_multimodal_model(tmp_path):
    """Kimi-K2.5: the language model's config is nested, its keys have the wrapper's prefix."""
    tensors, config = fixture("deepseek_v3-plain")
    moved = {f"language_model.{k}": v for k, v in tensors.items()}
    values = {"model_type": "kimi_k25", "text_config": {**config, "model_type": "kimi_k2"}}
    check(tmp_path, moved, values, "deepseek_v3-plain", "per_expert")


def test_glm4v_inside_its_wrapper(tmp_path):
    tensors, config = fixture("glm4_moe-plain")
    moved = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    values = {"model_type": "glm4v_moe", "text_config": {**config, "model_type": "glm4v_moe_text"}}
    check(tmp_path, moved, values, "glm4_moe-plain", "per_expert")


def test_ling_2_with_its_own_fields(tmp_path):
    tensors, config = fixture("bailing_hybrid-plain")
    read_as = config_from_hf(config)
    values = {
        "model_type": "bailing_moe_v2",
        "hidden_size": read_as.features,
        "moe_intermediate_size": read_as.hidden_features,
        "num_experts": read_as.num_experts,
        "num_experts_per_tok": read_as.num_experts_per_token,
        "num_shared_experts": read_as.shared.hidden_features // read_as.hidden_features,
        "n_group": read_as.router.num_groups,
        "topk_group": read_as.router.num_selected_groups,
        "norm_topk_prob": read_as.router.renormalize,
        "routed_scaling_factor": read_as.router.scale,
        "score_function": "sigmoid",
        "num_hidden_layers": read_as.num_layers,
        "first_k_dense_replace": read_as.moe_layers[0],
    }
    assert config_from_hf(values) == read_as
    check(tmp_path, tensors, values, "bailing_hybrid-plain", "per_expert")


def renamed(tensors, *pairs):
    """Keys with parts replaced, one pair after the other."""
    found = {}
    for key, value in tensors.items():
        for old, new in pairs:
            key = key.replace(old, new)
        found[key] = value
    return found


def test_deepseeks_own_names(tmp_path):
    tensors, config = fixture("deepseek_v3-plain")
    native = renamed(
        tensors,
        ("model.layers", "layers"),
        ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
        ("mlp.", "ffn."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
        ("model.embed_tokens", "embed"),
        ("lm_head", "head"),
    )
    assert "layers.1.ffn.experts.11.w3.weight" in native
    check(tmp_path, native, config, "deepseek_v3-plain", "native")


def llama4_parts(name):
    """(everything but the experts and router, router, gate, up, down, block)."""
    tensors, config = fixture(name)
    block = "model.layers.1.feed_forward."
    fused = tensors[f"{block}experts.gate_up_proj"]
    gate, up = np.split(fused, 2, axis=-1)
    rest = {k: v for k, v in tensors.items() if not k.startswith(f"{block}experts.")}
    return rest, gate, up, tensors[f"{block}experts.down_proj"], block, config


@pytest.mark.parametrize("name", ["llama4-plain", "llama4-square"])
def test_llama4_with_a_linear_an_expert(tmp_path, name):
    found, gate, up, down, block, config = llama4_parts(name)
    for e in range(len(gate)):
        for key, value in (("gate", gate), ("up", up), ("down", down)):
            found[f"{block}experts.{e}.{key}_proj.weight"] = value[e].T
    check(tmp_path, found, config, name, "per_expert")


@pytest.mark.parametrize("name", ["llama4-plain", "llama4-square"])
def test_metas_own_names(tmp_path, name):
    found, gate, up, down, block, config = llama4_parts(name)
    router = found.pop(f"{block}router.weight")
    found = renamed(
        found,
        ("shared_expert.gate_proj", "w_in_shared_FD"),
        ("shared_expert.up_proj", "w_swiglu_FD"),
        ("shared_expert.down_proj", "w_out_shared_DF"),
        ("model.layers", "layers"),
    )
    block = block.removeprefix("model.")
    d, f = gate.shape[1:]
    found[f"{block}router_DE"] = router.T
    found[f"{block}experts.moe_w_in_eD_F"] = gate.reshape(-1, f)
    found[f"{block}experts.moe_w_swiglu_eD_F"] = up.reshape(-1, f)
    found[f"{block}experts.moe_w_out_eF_D"] = down.reshape(-1, d)
    check(tmp_path, found, config, name, "meta")


@pytest.mark.parametrize("name", ["gpt_oss-plain", "gpt_oss-square"])
def test_openais_own_names(tmp_path, name):
    """mlp1 is [E, 2F, D] with gate and up in turn, mlp2 [E, D, F]: both turned round."""
    tensors, config = fixture(name)
    found = {}
    for key, value in renamed(
        tensors,
        ("model.layers", "block"),
        ("mlp.router", "mlp.gate"),
        ("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"),
        ("mlp.experts.down_proj_bias", "mlp.mlp2_bias"),
        ("mlp.experts.gate_up_proj", "mlp.mlp1_weight"),
        ("mlp.experts.down_proj", "mlp.mlp2_weight"),
    ).items():
        found[key] = value.swapaxes(1, 2) if key.endswith(("1_weight", "2_weight")) else value
    assert "block.0.mlp.mlp1_bias" in found
    check(tmp_path, found, config, name, "openai")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (FIXTURE_OF[family.name], form.name)
        for family in TABLE
        for form in family.forms
        if "mxfp4" not in form.name and family.name in FIXTURE_OF
    ],
)
def test_every_form_there_and_back(tmp_path, name, form):
    """Written in the form and read again, parameters are the same; so are the files, back home."""
    home = open_source(FIXTURES / name)
    loaded = checkpoint.load(FIXTURES / name)
    checkpoint.save(tmp_path / "there", loaded, form=form)
    named = form if any(f.on_request for f in home.family.forms if f.name == form) else None
    away = open_source(tmp_path / "there", form=named)
    for index, layer in away.layers.items():
        assert layer.form.name == form
        for key, value in away.parameters(index).items():
            np.testing.assert_array_equal(read(value), read(home.parameters(index)[key]))
    own = {layer.form.name for layer in home.layers.values()}.pop()
    again = checkpoint.load(tmp_path / "there", form=named)
    checkpoint.save(tmp_path / "back", again, form=own)
    # DeepSeek-V4's own form begins at "layers.", transformers writes "model." before it.
    wanted = {key.removeprefix("model."): value for key, value in home.tensors.items()}
    saved = {k.removeprefix("model."): v for k, v in tensors_of(tmp_path / "back").items()}
    assert set(saved) == set(wanted)
    for key, value in saved.items():
        np.testing.assert_array_equal(value, wanted[key], err_msg=key)

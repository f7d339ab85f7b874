"""Mistakes that public converters have made: each one shows in a fixture's outputs.

The parity tests hold outputs to 1e-5. Here every mistake is made on purpose, on what was read
right, and must move the outputs of its fixture far beyond that; so the same mistake in the table
or the reader turns the parity test red. Numbers in names are those of the public bugs:

 1 down_proj transposed, square     2 interleaved read as concatenated   4 halves when D = 2F
 5 norm_topk_prob                   6 scale skipped without renorm       7 raw logits as weights
 8 bias in the weights              9 group score and mask              10 score from (s + b) - b
11 bias in bfloat16                12 shared gate unused                17 Llama 4 weights
18 Llama 4 w2                      25 identity experts
"""

import dataclasses

import ml_dtypes
import numpy as np
import numpy_moe
import pytest
from golden import FIXTURES, fixture, golden_of, relative_error, router_inputs_of

from moe_flax.checkpoint.layouts import rearrange
from moe_flax.checkpoint.mapping import axis_sizes, read
from moe_flax.checkpoint.modules import build_moe
from moe_flax.checkpoint.source import Source, open_source


def loaded(name):
    """(parameters, configuration, inputs, expected outputs) of a fixture's last MoE layer."""
    source = open_source(FIXTURES / name)
    inputs, outputs = golden_of(FIXTURES / name)
    index = max(outputs)
    parameters = {key: read(value) for key, value in source.parameters(index).items()}
    return parameters, source.layers[index].config, inputs, outputs[index]


def router(**changes):
    def change(p, c):
        return p, dataclasses.replace(c, router=dataclasses.replace(c.router, **changes))

    return change


def layer(**changes):
    return lambda p, c: (p, dataclasses.replace(c, **changes))


def parameter(name, change):
    return lambda p, c: (p | {name: change(p[name])}, c)


def relaid(name, right, wrong):
    """The parameter as if its stored tensor lay in another layout."""
    own = {"experts.wi": "E J D F", "experts.wi_bias": "E J F", "experts.wo": "E F D"}[name]

    def change(p, c):
        sizes = axis_sizes(c, name)
        stored = rearrange(p[name], own, right, sizes)
        return p | {name: rearrange(stored, wrong, own, sizes)}, c

    return change


def both(first, second):
    return lambda p, c: second(*first(p, c))


def swapped_branches(value):
    return value[:, ::-1]


def lexicographic(p, c):
    order = sorted(range(c.num_experts), key=str)
    return {k: v[order] if k.startswith("experts.") else v for k, v in p.items()}, c


def thirds(p, c):
    """w1, w2, w3 read as gate, up, down; they all fit when D = F."""
    up, down = p["experts.wi"][:, 1], p["experts.wo"]
    wi = np.stack([p["experts.wi"][:, 0], down.copy()], 1)
    return p | {"experts.wi": wi, "experts.wo": up}, c


def no_shared(p, c):
    return p, dataclasses.replace(c, shared=None)


def ungated(p, c):
    return p, dataclasses.replace(c, shared=dataclasses.replace(c.shared, combine="add"))


zero = np.zeros_like
CONCATENATED = relaid("experts.wi", "E D (F J)", "E D (J F)")
MISTAKES = {
    "2 gate_up concatenated": ("gpt_oss-plain", CONCATENATED, 0.1),
    "2 bias not de-interleaved": (
        "gpt_oss-plain", relaid("experts.wi_bias", "E (F J)", "E (J F)"), 1e-2),
    "gate and up swapped": ("gpt_oss-plain", parameter("experts.wi", swapped_branches), 0.1),
    "gate and up swapped, silu": ("mixtral-plain", parameter("experts.wi", swapped_branches), 0.1),
    "1 down_proj transposed": ("gpt_oss-square", relaid("experts.wo", "E F D", "E D F"), 0.1),
    "down_proj_bias dropped": ("gpt_oss-plain", parameter("experts.wo_bias", zero), 1e-3),
    "router bias dropped": ("gpt_oss-plain", parameter("router.bias", zero), 1e-2),
    "silu for gpt_oss": ("gpt_oss-plain", layer(activation="silu"), 0.1),
    "no clamp": (
        "gpt_oss-plain",
        lambda p, c: (p, dataclasses.replace(c, activation=dataclasses.replace(
            numpy_moe.resolve_activation(c.activation), limit=None))), 1e-2),
    "no clamp, DeepSeek-V4": (
        "deepseek_v4-plain",
        lambda p, c: (p, dataclasses.replace(c, activation=dataclasses.replace(
            numpy_moe.resolve_activation(c.activation), limit=None))), 1e-3),
    "clamp before, Step-3": (
        "step3p7-plain",
        lambda p, c: (p, dataclasses.replace(c, activation=dataclasses.replace(
            numpy_moe.resolve_activation(c.activation), clamp="before"))), 1e-3),
    "softmax over all, no renorm": (
        "gpt_oss-plain", router(score="softmax", weight_activation=None), 0.01),
    "w1 w2 w3 as gate up down": ("mixtral-square", thirds, 0.1),
    "lexicographic experts": ("mixtral-plain", lexicographic, 0.1),
    "4 halves of the wrong axis": (
        "qwen3_moe-double", relaid("experts.wi", "E (J F) D", "E D (J F)"), 0.1),
    "9 group score is the best": ("deepseek_v3-plain", router(group_score="max"), 1e-2),
    "9 no groups": ("deepseek_v3-plain", router(num_groups=1, num_selected_groups=1), 1e-2),
    "9 groups masked with 0": ("deepseek_v3-plain", router(group_mask="0"), 0.1),
    "correction bias dropped": (
        "deepseek_v3-plain", parameter("router.correction_bias", zero), 0.1),
    "scale dropped": ("deepseek_v3-plain", router(scale=1.0), 0.1),
    "6 scale dropped without renorm": ("deepseek_v3-square", router(scale=1.0), 0.1),
    "5 norm_topk_prob on": ("qwen3_moe-square", router(renormalize=True), 1e-2),
    "5 norm_topk_prob off": ("qwen3_moe-plain", router(renormalize=False), 1e-2),
    "5 norm_topk_prob off, DeepSeek-V3": (
        "deepseek_v3-plain", router(renormalize=False), 1e-2),
    "7 raw logits": ("qwen3_moe-square", router(score="identity"), 1e-2),
    "12 shared gate unused": ("qwen2_moe-plain", ungated, 0.1),
    "shared experts dropped": ("llama4-plain", no_shared, 0.1),
    "17 weights on the output": ("llama4-plain", router(apply_to="output"), 1e-2),
    "17 softmax for sigmoid": ("llama4-plain", router(weight_activation="softmax"), 1e-2),
    "18 w2 transposed": ("llama4-square", relaid("experts.wo", "E F D", "E D F"), 0.1),
    "25 no identity experts": (
        "longcat_flash-plain",
        lambda p, c: (
            {k: v[..., : c.num_experts] if k.startswith("router.") else v for k, v in p.items()},
            c), 1e-3),
    "no groups, DeepSeek-V2": (
        "deepseek_v2-plain", router(num_groups=1, num_selected_groups=1), 1e-3),
    "average for sum": (
        "cohere2_moe-square",
        lambda p, c: (p, dataclasses.replace(
            c, shared=dataclasses.replace(c.shared, combine="average"))), 0.1),
    "L1 for L2 norm": ("dbrx-plain", router(renormalize_order=1.0), 1e-2),
    "per-expert scale dropped": (
        "gemma4-plain", parameter("router.per_expert_scale", np.ones_like), 1e-2),
    "block bias dropped": ("jetmoe-plain", parameter("experts.wo_bias", zero), 1e-2),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_in_the_outputs(mistake):
    name, change, least = MISTAKES[mistake]
    parameters, config, inputs, expected = loaded(name)
    seen = router_inputs_of(FIXTURES / name)
    assert relative_error(numpy_moe.forward(parameters, config, inputs, seen), expected) < 1e-5
    wrong = numpy_moe.forward(*change(parameters, config), inputs, seen)
    assert relative_error(wrong, expected) > least


def test_8_correction_bias_in_the_weights_shows(monkeypatch):
    parameters, config, inputs, expected = loaded("deepseek_v3-plain")

    def wrong(logits, router, k, p):
        scores = 1 / (1 + np.exp(-logits)) + p["router.correction_bias"]
        ids = numpy_moe._choose(scores, router, k)
        weights = np.take_along_axis(scores, ids, -1)
        return ids, weights / weights.sum(-1, keepdims=True) * router.scale

    monkeypatch.setattr(numpy_moe, "route", wrong)
    assert relative_error(numpy_moe.forward(parameters, config, inputs), expected) > 1e-2


def test_11_correction_biases_are_read_in_float32():
    """Around 7, bfloat16 has steps of 1/32: biases of different experts would become equal."""
    tensors, config = fixture("deepseek_v3-plain")
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = np.float32(7) + np.float32(1e-3) * np.arange(12, dtype=np.float32)
    assert len(set(bias.astype(ml_dtypes.bfloat16).tolist())) < 12
    source = Source(dict(tensors) | {key: bias}, config)
    built = build_moe(source.config, source.parameters(1), dtype=ml_dtypes.bfloat16)
    np.testing.assert_array_equal(built.router.correction_bias[...], bias)
    assert built.router.kernel.dtype == np.float32
    assert built.experts.wi.dtype == ml_dtypes.bfloat16


def test_24_layers_past_the_last_are_no_layers():
    tensors, config = fixture("deepseek_v3-plain")
    mtp = {k.replace("layers.1.", "layers.2."): v for k, v in tensors.items() if "layers.1." in k}
    source = Source(dict(tensors) | mtp, config)
    assert tuple(source.layers) == (1,)
    assert source.beyond == [2]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_27_prefixes_of_multimodal_models(prefix):
    tensors, config = fixture("llama4-plain")
    moved = {k.replace("model.", prefix, 1): v for k, v in tensors.items()}
    text = {"model_type": "llama4", "text_config": config}
    assert tuple(Source(moved, text).layers) == (1,)


def test_hash_layers_of_deepseek_v4_have_no_correction_bias():
    tensors, config = fixture("deepseek_v4-plain")
    tensors = dict(tensors)
    del tensors["model.layers.0.ffn.gate.bias"]
    tensors["model.layers.0.ffn.gate.tid2eid"] = np.zeros((16, 3), np.int64)
    for change in ({"mlp_layer_types": ["hash_moe", "moe"]}, {"num_hash_layers": 1}):
        values = {k: v for k, v in config.items() if k != "mlp_layer_types"} | change
        source = Source(tensors, values)
        assert not source.layers[0].config.router.correction_bias
        assert source.layers[1].config.router.correction_bias
        assert "model.layers.0.ffn.gate.tid2eid" in source.rest

"""examples/mixtral_format.py: the whole decoder through a Mixtral directory."""

import dataclasses
import json

import jax
import mixtral_format
import numpy as np
import pytest
import safetensors.numpy
from decoder import Decoder, DecoderConfig
from flax import nnx

import moe_flax

CONFIG = DecoderConfig(
    features=16,
    num_layers=2,
    num_heads=2,
    moe=moe_flax.MoEConfig(
        features=16,
        hidden_features=24,
        num_experts=4,
        num_experts_per_token=2,
        router=moe_flax.RouterConfig(correction_bias=True),
    ),
)


@nnx.jit
def run(model, tokens):
    return model(tokens)[0]


def test_same_logits_and_every_weight(tmp_path):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    mixtral_format.save(tmp_path / "m", model, context=32)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "mixtral"
    loaded = mixtral_format.load(tmp_path / "m")
    ours, theirs = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (model, loaded))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    np.testing.assert_allclose(run(loaded, tokens), run(model, tokens), rtol=1e-5, atol=1e-6)


def test_files_are_as_mixtral_has_them(tmp_path):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    mixtral_format.save(tmp_path / "m", model, context=32)
    stored = {}
    for path in (tmp_path / "m").glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(path)
    layer = model.layers[1]
    for name, expected in {
        "self_attn.q_proj": layer.attention.query.kernel[...].T,
        "self_attn.o_proj": layer.attention.out.kernel[...].T,
        "post_attention_layernorm": layer.feed_forward_norm.scale[...],
        "block_sparse_moe.gate": layer.feed_forward.router.kernel[...].T,
        "block_sparse_moe.experts.3.w1": layer.feed_forward.experts.wi[3, 0].T,
        "block_sparse_moe.experts.3.w3": layer.feed_forward.experts.wi[3, 1].T,
        "block_sparse_moe.experts.3.w2": layer.feed_forward.experts.wo[3].T,
    }.items():
        np.testing.assert_array_equal(stored[f"model.layers.1.{name}.weight"], expected)
    np.testing.assert_array_equal(stored["lm_head.weight"], model.head.kernel[...].T)
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], model.embed.embedding[...])
    assert len(stored) == 3 + 2 * (2 + 4 + 1 + 4 * 3)


def test_a_bias_in_use_is_refused(tmp_path):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    bias = model.layers[1].feed_forward.router.correction_bias
    bias[...] = bias[...].at[2].set(0.1)
    with pytest.raises(ValueError, match="layer 1 routes by a correction bias"):
        mixtral_format.save(tmp_path / "m", model, context=32)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": None, "hidden_features": 8}, "dense decoder"),
        (
            {"moe": dataclasses.replace(CONFIG.moe, router=moe_flax.RouterConfig(scale=2.0))},
            "Mixtral's router is",
        ),
    ],
    ids=["dense", "another router"],
)
def test_other_decoders_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        mixtral_format.mixtral_config(dataclasses.replace(CONFIG, **change))

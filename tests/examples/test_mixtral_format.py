"""examples/mixtral_format.py: the whole decoder through a Mixtral directory."""

import dataclasses
import json

import jax
import mixtral_format
import numpy as np
import pytest
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

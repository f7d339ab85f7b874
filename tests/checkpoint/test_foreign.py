"""Layouts of other libraries: what they mean, and that there and back is the identity."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from golden import FIXTURES, tensors_of

from moe_flax.checkpoint import load_parameters
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.families import config_from_hf
from moe_flax.checkpoint.foreign import LAYOUTS, from_layout, to_layout
from moe_flax.checkpoint.mapping import parameter_shapes
from moe_flax.config import MoEConfig, RouterConfig, SharedConfig


def config_for(name, e=4, d=6, f=8, s=10):
    """A layer with every parameter that the layout has a place for."""
    held = {entry.parameter for entry in LAYOUTS[name]}
    return MoEConfig(
        features=d,
        hidden_features=f,
        num_experts=e,
        num_experts_per_token=1,
        router=RouterConfig(
            logit_bias="router.bias" in held and name != "maxtext",
            correction_bias="router.correction_bias" in held,
        ),
        shared=SharedConfig(s) if "shared.wi" in held else None,
        use_bias="experts.wi_bias" in held,
    )


def random(config, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in parameter_shapes(config).items()}


@pytest.mark.parametrize("name", LAYOUTS)
@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(st.data())
def test_there_and_back_is_the_identity(name, data):
    e, d, s = (data.draw(st.integers(1, 6)) for _ in range(3))
    shards = data.draw(st.sampled_from([1, 2, 4]))
    config = config_for(name, e, d, 4 * data.draw(st.integers(1, 3)), s)
    layers = data.draw(st.sampled_from([None, 1, 3]))
    mine = random(config) if layers is None else [random(config, i) for i in range(layers)]
    theirs = to_layout(mine, config, name, shards=shards)
    back = from_layout(theirs, config, name, shards=shards, layers=layers)
    for a, b in zip(
        [mine] if layers is None else mine, [back] if layers is None else back, strict=True
    ):
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def test_mslk_and_llama4():
    config = config_for("mslk")
    mine = random(config)
    theirs = to_layout(mine, config, "mslk")
    np.testing.assert_array_equal(theirs["moe_w_in_eDF"], mine["experts.wi"][:, 0])
    np.testing.assert_array_equal(theirs["moe_w_swiglu_eDF"], mine["experts.wi"][:, 1])
    np.testing.assert_array_equal(theirs["w_swiglu_FD"], mine["shared.wi"][1].T)
    np.testing.assert_array_equal(theirs["w_out_shared_DF"], mine["shared.wo"].T)
    flat = to_layout(mine, config, "meta_llama4")
    np.testing.assert_array_equal(flat["moe_w_out_eF_D"][8:16], mine["experts.wo"][1])


def test_tensor_parallel_shards_each_hold_gate_and_up():
    config = config_for("tpu_inference_w13")
    mine = random(config)
    w13 = to_layout(mine, config, "tpu_inference_w13", shards=2)["w13"]
    gate, up = mine["experts.wi"][:, 0], mine["experts.wi"][:, 1]
    parts = [gate[..., :4], up[..., :4], gate[..., 4:], up[..., 4:]]
    np.testing.assert_array_equal(w13, np.concatenate(parts, -1))
    whole = to_layout(mine, config, "tpu_inference_w13")["w13"]
    np.testing.assert_array_equal(whole, np.concatenate([gate, up], -1))
    with pytest.raises(CheckpointError, match="does not divide into 3 shards"):
        to_layout(mine, config, "tpu_inference_w13", shards=3)


def test_scanned_layers_are_the_second_axis():
    """MaxText's param_scan_axis is 1 for every parameter, the router's and vectors too."""
    config = config_for("maxtext")
    mine = [random(config, i) for i in range(3)]
    theirs = to_layout(mine, config, "maxtext")
    assert theirs["wi_0"].shape == (4, 3, 6, 8)
    np.testing.assert_array_equal(theirs["wi_1"][:, 2], mine[2]["experts.wi"][:, 1])
    np.testing.assert_array_equal(theirs["gate.kernel"][:, 1], mine[1]["router.kernel"])
    np.testing.assert_array_equal(theirs["gate.bias"][:, 2], mine[2]["router.correction_bias"])
    shared = theirs["shared_experts.wi_1.kernel"]
    np.testing.assert_array_equal(shared[:, 1], mine[1]["shared.wi"][1])
    assert {key: value.shape[1] for key, value in theirs.items()} == dict.fromkeys(theirs, 3)


def test_openai_names_interleave_weights_and_biases():
    path = FIXTURES / "gpt_oss-square"
    mine = load_parameters(path, 0)
    theirs = to_layout(mine, config_from_hf(path), "gpt_oss")
    np.testing.assert_array_equal(
        theirs["mlp1_weight"][:, 1::2].swapaxes(1, 2), mine["experts.wi"][:, 1]
    )
    np.testing.assert_array_equal(theirs["mlp1_bias"][:, ::2], mine["experts.wi_bias"][:, 0])
    np.testing.assert_array_equal(theirs["mlp2_weight"].swapaxes(1, 2), mine["experts.wo"])


@pytest.mark.parametrize("layers", [None, 2])
def test_maxtext_takes_gate_and_up_from_one_stored_tensor(layers):
    """gpt-oss' interleaved gate_up_proj becomes wi_0 and wi_1, and both go back into it."""
    path = FIXTURES / "gpt_oss-plain"
    stored, config = tensors_of(path), config_from_hf(path)
    mine = [load_parameters(path, i) for i in range(layers or 1)]
    theirs = to_layout(mine if layers else mine[0], config, "maxtext")
    for i in range(layers or 1):
        block = f"model.layers.{i}.mlp."
        here = {k: v[:, i] for k, v in theirs.items()} if layers else theirs
        for branch in (0, 1):
            for name, key in (
                (f"wi_{branch}", "gate_up_proj"),
                (f"wi_{branch}_bias", "gate_up_proj_bias"),
            ):
                np.testing.assert_array_equal(
                    here[name], stored[f"{block}experts.{key}"][..., branch::2]
                )
        np.testing.assert_array_equal(here["wo"], stored[f"{block}experts.down_proj"])
        np.testing.assert_array_equal(here["gate.kernel"].T, stored[f"{block}router.weight"])
        np.testing.assert_array_equal(here["gate.bias"], stored[f"{block}router.bias"])
    back = from_layout(theirs, config, "maxtext", layers=layers)
    for a, b in zip(mine, back if layers else [back], strict=True):
        assert set(a) == set(b)
        for key, value in a.items():
            np.testing.assert_array_equal(b[key], value)


def test_maxtext_has_one_bias_for_a_router():
    both = dataclasses.replace(config_for("maxtext"), use_bias=False)
    router = dataclasses.replace(both.router, logit_bias=True)
    both = dataclasses.replace(both, router=router)
    with pytest.raises(CheckpointError, match=r"tensor 'gate\.bias': .* two parameters"):
        to_layout(random(both), both, "maxtext")
    theirs = to_layout(random(config_for("maxtext")), config_for("maxtext"), "maxtext")
    with pytest.raises(CheckpointError, match=r"tensor 'gate\.bias': .* two parameters"):
        from_layout(theirs, both, "maxtext")


def test_jax_arrays_stay_jax_arrays():
    config = config_for("maxtext")
    mine = {key: jnp.asarray(value) for key, value in random(config).items()}
    theirs = to_layout(mine, config, "maxtext")
    assert all(isinstance(value, jnp.ndarray) for value in theirs.values())
    back = from_layout(theirs, config, "maxtext")
    assert all(isinstance(value, jnp.ndarray) for value in back.values())


def test_errors():
    config = config_for("mslk")
    theirs = to_layout(random(config), config, "mslk")
    with pytest.raises(CheckpointError, match="'vllm' is not known; known: mslk"):
        to_layout({}, config, "vllm")
    with pytest.raises(CheckpointError, match="tensor 'router_DE': is missing"):
        from_layout({k: v for k, v in theirs.items() if k != "router_DE"}, config, "mslk")
    with pytest.raises(CheckpointError, match="tensor 'x': belongs to no parameter"):
        from_layout(theirs | {"x": 1}, config, "mslk")
    with pytest.raises(CheckpointError, match=r"tensor 'moe_w_out_eFD': layout"):
        from_layout(theirs | {"moe_w_out_eFD": np.zeros((4, 6, 8))}, config, "mslk")
    biased = dataclasses.replace(config, use_bias=True)
    with pytest.raises(CheckpointError, match="no place for"):
        to_layout(random(biased), biased, "mslk")
    with pytest.raises(CheckpointError, match=r"no place for 'experts\.wi_bias'"):
        from_layout(theirs, biased, "mslk")

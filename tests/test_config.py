import dataclasses
import tomllib

import numpy as np
import pytest

from moe_flax import config as config_module
from moe_flax.activations import Activation
from moe_flax.config import MoEConfig, RouterConfig, SharedConfig, preset_names

# Published (total, active) parameters in billions: model cards and technical reports.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-next-80b-a3b": (80, 3.9),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1040, 32),
    "glm-4.5": (355, 32),
    "glm-4.5-air": (106, 12),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "llama4-scout": (109, 17),
    "llama4-maverick": (400, 17),
    "olmoe-1b-7b": (6.9, 1.3),
    "phi-3.5-moe": (41.9, 6.6),
    "granite-3.1-3b-a800m": (3.3, 0.8),
    "minimax-m2": (230, 10),
}


def parameters(config, num_experts):
    """Parameters of ``num_experts`` experts, the shared ones and the router in all MoE layers."""
    d, f = config.features, config.hidden_features
    layer = num_experts * 3 * d * f + config.num_experts * d
    if config.shared is not None:
        layer += 3 * d * config.shared.hidden_features
    return layer * len(config.moe_layers) / 1e9


def test_presets_are_all_there():
    assert set(preset_names()) == {*PUBLISHED, "tiny"}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_preset_agrees_with_published_parameter_counts(name):
    config = MoEConfig.preset(name)
    total, active = PUBLISHED[name]
    # The rest is attention, embeddings and dense layers: few of the total, more of the active.
    assert 0.88 * total < parameters(config, config.num_experts) < total
    assert 0.3 * active < parameters(config, config.num_experts_per_token) < active


@pytest.mark.parametrize("name", preset_names())
def test_preset_round_trips_and_names_its_sources(name):
    config = MoEConfig.preset(name)
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert config.num_layers > max(config.moe_layers)
    assert list(config.moe_layers) == sorted(set(config.moe_layers))
    assert config.family or name == "tiny"

    directory = config_module._preset_directory()
    values = tomllib.loads((directory / f"{name}.toml").read_text())
    source = values.pop("source")
    paths = set()
    for key, value in values.items():
        paths |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
    assert set(source) == paths
    assert all(isinstance(text, str) and text for text in source.values())


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("scale", "a", TypeError, "scale must be a number, got 'a'"),
        ("scale", True, TypeError, "scale must be a number, got True"),
        ("scale", float("nan"), ValueError, "scale must be a number, got nan"),
        ("scale", float("inf"), ValueError, "scale must be finite, got inf"),
        ("jitter", None, TypeError, "jitter must be a number, got None"),
        ("renormalize_epsilon", float("nan"), ValueError, "renormalize_epsilon must be a number"),
        ("renormalize_order", "2", TypeError, "renormalize_order must be a number, got '2'"),
        ("logit_softcap", "30", TypeError, "logit_softcap must be a number, got '30'"),
        ("capacity_factor", [1.0], TypeError, r"capacity_factor must be a number, got \[1.0\]"),
        ("renormalize", "no", TypeError, "renormalize must be True or False, got 'no'"),
        ("correction_bias", 1, TypeError, "correction_bias must be True or False, got 1"),
        ("num_groups", 2.0, TypeError, "num_groups must be an integer, got 2.0"),
        ("num_identity_experts", -1, ValueError, "num_identity_experts must be >= 0, got -1"),
        ("score", ["softmax"], ValueError, "score must be one of"),
    ],
)
def test_router_values_of_another_type(field, value, error, message):
    with pytest.raises(error, match=message):
        RouterConfig(**{field: value})
    values = MoEConfig.preset("tiny").to_dict()
    with pytest.raises(error, match=message):
        MoEConfig.from_dict(values | {"router": {field: value}})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("features", True, "features must be an integer, got True"),
        ("num_experts", "8", "num_experts must be an integer, got '8'"),
        ("use_bias", "no", "use_bias must be True or False, got 'no'"),
        ("num_layers", 2.5, "num_layers must be an integer, got 2.5"),
        ("moe_layers", 3, "moe_layers must be tuple, got 3"),
        ("moe_layers", ["a"], "a layer of moe_layers must be Integral, got 'a'"),
        ("family", 3, "family must be str, got 3"),
        ("router", "softmax", "a RouterConfig must be Mapping, got 'softmax'"),
        ("shared", 8, "a SharedConfig must be Mapping, got 8"),
        ("activation", 3, "activation"),
    ],
)
def test_layer_values_of_another_type(field, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MoEConfig.from_dict(MoEConfig.preset("tiny").to_dict() | {field: value})


def test_numbers_of_numpy_are_numbers():
    router = RouterConfig(scale=np.float32(2.5), num_groups=np.int64(2), logit_softcap=30)
    assert router.scale == 2.5


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match=r"no preset 'mixtral'; known presets: .*mixtral-8x7b"):
        MoEConfig.preset("mixtral")


@pytest.mark.parametrize("name", ["../pyproject", "", "tiny.toml"])
def test_preset_takes_names_only(name):
    with pytest.raises(ValueError, match="known presets"):
        MoEConfig.preset(name)


def test_round_trip_keeps_every_field():
    config = MoEConfig(
        16,
        24,
        12,
        3,
        router=RouterConfig(
            score="sqrt_softplus",
            renormalize=False,
            renormalize_epsilon=1e-6,
            scale=2.5,
            num_groups=4,
            num_selected_groups=2,
            group_score="max",
            group_mask="0",
            correction_bias=True,
            logit_bias=True,
            logit_softcap=30.0,
            weight_activation="sigmoid",
            apply_to="input",
            renormalize_mode="max",
            renormalize_order=2.0,
            jitter=0.1,
            num_identity_experts=4,
            per_expert_scale=True,
            capacity_factor=1.25,
            capacity_scope="sequence",
            capacity_priority="weight",
        ),
        shared=SharedConfig(8, "gated", activation=Activation("gelu", up_offset=1.0)),
        activation=Activation("silu", alpha=1.7, limit=7.0, clamp="after"),
        use_bias=True,
        latent_features=10,
        num_layers=4,
        moe_layers=(1, 3),
        family="none",
    )
    # What excludes another of these is in the next two.
    others = ("selection", "expert_capacity", "capacity_fraction", "capacity_renormalize")
    for field in dataclasses.fields(RouterConfig):
        if field.name not in others:
            assert getattr(config.router, field.name) != field.default, field.name
    for router in (
        RouterConfig(expert_capacity=3),
        RouterConfig(capacity_fraction=0.5, capacity_renormalize=True),
    ):
        other = MoEConfig(16, 24, 12, 3, router=router)
        assert MoEConfig.from_dict(other.to_dict()) == other
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert hash(config) == hash(MoEConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_token": 0}, "between 1 and 8.* got 0"),
        ({"num_experts_per_token": 9}, "between 1 and 8.* got 9"),
        ({"features": 0}, "features must be >= 1, got 0"),
        ({"hidden_features": -1}, "hidden_features must be >= 1"),
        ({"num_experts": 0}, "num_experts must be >= 1"),
        ({"activation": "swish"}, "'swish' is not known; allowed: .*'silu'"),
        ({"activation": 3}, "3 is not known"),
        ({"router": {"num_groups": 3}}, "8 experts do not divide into num_groups=3"),
        ({"router": {"num_groups": 8, "num_selected_groups": 1}}, "between 1 and 1"),
        ({"router": {"num_groups": 0}}, "num_selected_groups <= num_groups"),
        ({"router": {"num_groups": 2, "num_selected_groups": 3}}, "num_selected_groups=3"),
        ({"router": {"score": "tanh"}}, "score must be one of .*'softmax'.* got 'tanh'"),
        ({"router": {"group_score": "sum"}}, "group_score must be one of"),
        ({"router": {"group_mask": 0}}, "group_mask must be one of"),
        ({"router": {"weight_activation": "relu"}}, "weight_activation must be one of"),
        ({"router": {"apply_to": "both"}}, "apply_to must be one of"),
        ({"router": {"renormalize_mode": "min"}}, "renormalize_mode must be one of"),
        ({"router": {"renormalize_order": 0.0}}, "renormalize_order must be positive"),
        ({"router": {"renormalize_epsilon": -1.0}}, "renormalize_epsilon must be >= 0"),
        ({"router": {"selection": "random"}}, "selection must be one of"),
        ({"router": {"selection": "sparse_mixer"}}, "needs renormalize=False"),
        ({"router": {"logit_softcap": 0.0}}, "logit_softcap must be positive"),
        ({"router": {"num_identity_experts": -1}}, "num_identity_experts must be >= 0"),
        ({"router": {"capacity_factor": 0.0}}, "capacity_factor must be positive"),
        ({"router": {"top_k": 2}}, r"RouterConfig has no field \['top_k'\]; fields: "),
        ({"shared": {"hidden_features": 0}}, "hidden_features must be >= 1"),
        ({"shared": {"hidden_features": 8, "combine": "mean"}}, "combine must be one of"),
        ({"shared": {"hidden_features": 8, "activation": "x"}}, "'x' is not known"),
        ({"shared": {}}, r"SharedConfig needs \['hidden_features'\]"),
        ({"experts": 8}, r"MoEConfig has no field \['experts'\]"),
        ({"activation": {"function": "gelu", "alpha": 2.0}}, "alpha applies to silu only"),
        ({"activation": {"limit": -1.0}}, "limit must be positive"),
        ({"moe_layers": [4]}, r"moe_layers .*num_layers=4"),
        ({"moe_layers": [1, 1]}, "moe_layers must rise"),
    ],
)
def test_bad_values_say_what_is_allowed(values, message):
    base = {"features": 16, "hidden_features": 24, "num_experts": 8, "num_experts_per_token": 2}
    with pytest.raises(ValueError, match=message):
        MoEConfig.from_dict({**base, "num_layers": 4, **values})


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match=r"MoEConfig needs \['hidden_features', 'num_experts'"):
        MoEConfig.from_dict({"features": 4})


def test_sparse_mixer_takes_two_experts():
    router = RouterConfig(selection="sparse_mixer", renormalize=False)
    with pytest.raises(ValueError, match="num_experts_per_token=2, got 3"):
        MoEConfig(16, 24, 8, 3, router=router)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 8.0}, "num_experts must be an integer, got 8.0"),
        ({"num_experts_per_token": 1.5}, "num_experts_per_token must be an integer, got 1.5"),
        ({"features": "4"}, "features must be an integer, got '4'"),
        ({"router": {"score": "sigmoid"}}, "router must be RouterConfig, got {'score'"),
        ({"shared": 16}, "shared must be SharedConfig or NoneType, got 16"),
    ],
)
def test_wrong_types_say_what_is_allowed(values, message):
    sizes = {"features": 4, "hidden_features": 4, "num_experts": 8, "num_experts_per_token": 2}
    with pytest.raises(TypeError, match=message):
        MoEConfig(**(sizes | values))

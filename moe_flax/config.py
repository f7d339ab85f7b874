"""What a mixture-of-experts layer is, as frozen data: no arrays, no mesh, no backend."""

import dataclasses
import itertools
import math
import numbers
import os
import pathlib
import tomllib
import typing as tp
from collections.abc import Mapping

from moe_flax.activations import Activation, resolve_activation

_Path: tp.TypeAlias = str | os.PathLike[str]


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _check_type(name: str, value: object, *allowed: type) -> None:
    if not isinstance(value, allowed):
        kinds = " or ".join(kind.__name__ for kind in allowed)
        raise TypeError(f"{name} must be {kinds}, got {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_count(name: str, value: tp.Any, least: int) -> None:
    """Raises unless the value is an integer (no bool) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if int(value) < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def _check_number(name: str, value: tp.Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value}")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How logits become expert choices and weights; the steps run in the order of the fields.

    Args:
      score: "softmax", "sigmoid", "identity" or "sqrt_softplus" of the float32 logits.
      renormalize: divide the K weights of a token by their norm.
      renormalize_epsilon: added to that norm (DeepSeek-V3: 1e-20), or its lower bound, see
        ``renormalize_mode``.
      scale: factor on the weights, after renormalisation.
      num_groups: experts are split into this many groups of equal size, in order.
      num_selected_groups: groups whose experts may be chosen.
      group_score: "top2_sum" or "max" of a group's choice scores.
      group_mask: what masked experts score: "-inf", or "0" (DeepSeek-V2).
      correction_bias: add a float32 bias to the scores for the choice only, never to the weights.
      logit_bias: the router has a learned bias on the logits (gpt-oss).
      logit_softcap: ``c * tanh(logits / c)``, or None.
      weight_activation: "softmax" or "sigmoid" over the K chosen scores, or None.
      apply_to: weights multiply the experts' "output", or their "input" (Llama 4).
      renormalize_mode: "add" the epsilon to the norm, or take the "max" of both (Ernie 4.5).
      renormalize_order: p of the norm; 1 is the sum (DBRX has others).
      selection: "top_k", or "sparse_mixer" (PhiMoE; K must be 2).
      jitter: PhiMoE's relative threshold, used by "sparse_mixer".
      num_identity_experts: experts past the real ones that return their input (LongCat).
      per_expert_scale: a learned factor an expert on its weight (Gemma 4).
      capacity_factor: tokens an expert takes, relative to an even share.
      expert_capacity: the same as a number (Switch).
      capacity_fraction: the same as a share of all tokens (NLLB); 1 never drops. At most one of the
        three is given, and without one no token is dropped.
      capacity_scope: tokens are counted over the whole "batch", or over each "sequence", which is
        the last axis but one of the layer's inputs.
      capacity_priority: who comes first, see ``moe_flax.capacity.apply_capacity``. "weight" goes by
        the router's largest probability.
      capacity_renormalize: renormalisation and scale come after dropping, over what is left.
    """

    score: tp.Literal["softmax", "sigmoid", "identity", "sqrt_softplus"] = "softmax"
    renormalize: bool = True
    renormalize_epsilon: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    num_selected_groups: int = 1
    group_score: tp.Literal["top2_sum", "max"] = "top2_sum"
    group_mask: tp.Literal["-inf", "0"] = "-inf"
    correction_bias: bool = False
    logit_bias: bool = False
    logit_softcap: float | None = None
    weight_activation: tp.Literal["softmax", "sigmoid"] | None = None
    apply_to: tp.Literal["output", "input"] = "output"
    renormalize_mode: tp.Literal["add", "max"] = "add"
    renormalize_order: float = 1.0
    selection: tp.Literal["top_k", "sparse_mixer"] = "top_k"
    jitter: float = 0.01
    num_identity_experts: int = 0
    per_expert_scale: bool = False
    capacity_factor: float | None = None
    expert_capacity: int | None = None
    capacity_fraction: float | None = None
    capacity_scope: tp.Literal["batch", "sequence"] = "batch"
    capacity_priority: tp.Literal["slot", "token", "weight"] = "slot"
    capacity_renormalize: bool = False

    def __post_init__(self):
        _check_choice("score", self.score, ("softmax", "sigmoid", "identity", "sqrt_softplus"))
        _check_choice("group_score", self.group_score, ("top2_sum", "max"))
        _check_choice("group_mask", self.group_mask, ("-inf", "0"))
        _check_choice("weight_activation", self.weight_activation, (None, "softmax", "sigmoid"))
        _check_choice("apply_to", self.apply_to, ("output", "input"))
        _check_choice("renormalize_mode", self.renormalize_mode, ("add", "max"))
        _check_choice("selection", self.selection, ("top_k", "sparse_mixer"))
        _check_choice("capacity_scope", self.capacity_scope, ("batch", "sequence"))
        _check_choice("capacity_priority", self.capacity_priority, ("slot", "token", "weight"))
        flags = ("renormalize", "correction_bias", "logit_bias", "per_expert_scale")
        for name in (*flags, "capacity_renormalize"):
            _check_bool(name, getattr(self, name))
        for name in ("num_groups", "num_selected_groups", "num_identity_experts"):
            _check_count(name, getattr(self, name), 0)
        for name in ("renormalize_epsilon", "scale", "renormalize_order", "jitter"):
            _check_number(name, getattr(self, name))
        for name in ("logit_softcap", "capacity_factor", "capacity_fraction"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
        if math.isinf(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.num_groups < 1 or not 1 <= self.num_selected_groups <= self.num_groups:
            raise ValueError(
                "need 1 <= num_selected_groups <= num_groups, got "
                f"num_selected_groups={self.num_selected_groups}, num_groups={self.num_groups}"
            )
        if self.selection == "sparse_mixer" and (
            self.renormalize
            or self.correction_bias
            or self.num_groups != 1
            or self.weight_activation is not None
        ):
            raise ValueError(
                "selection 'sparse_mixer' makes its own weights: it needs renormalize=False,"
                " correction_bias=False, num_groups=1 and weight_activation=None, got "
                f"renormalize={self.renormalize}, correction_bias={self.correction_bias}, "
                f"num_groups={self.num_groups}, weight_activation={self.weight_activation!r}"
            )
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap must be positive or None, got {self.logit_softcap}")
        if self.renormalize_epsilon < 0:
            raise ValueError(f"renormalize_epsilon must be >= 0, got {self.renormalize_epsilon}")
        if not self.renormalize_order > 0:
            raise ValueError(f"renormalize_order must be positive, got {self.renormalize_order}")
        self._check_capacity()

    def _check_capacity(self) -> None:
        if self.expert_capacity is not None:
            _check_count("expert_capacity", self.expert_capacity, 0)
        for name in ("capacity_factor", "capacity_fraction"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, got {value}")
        names = ("capacity_factor", "expert_capacity", "capacity_fraction")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(names)}, got {', '.join(given)}")
        if self.capacity_renormalize and (self.per_expert_scale or not self.renormalize):
            raise ValueError(
                "capacity_renormalize needs renormalize=True and per_expert_scale=False, got "
                f"renormalize={self.renormalize}, per_expert_scale={self.per_expert_scale}"
            )


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """The shared experts: one dense FFN that every token passes.

    Args:
      hidden_features: its width S (for n shared experts of width F: n * F).
      combine: "add" to the routed output, "average" with it (Cohere 2), or "gated" by
        ``sigmoid(x @ gate)`` and then added (Qwen2-MoE).
      activation: a name or Activation; None takes the routed experts' own.
    """

    hidden_features: int
    combine: tp.Literal["add", "average", "gated"] = "add"
    activation: str | Activation | None = None

    def __post_init__(self):
        _check_choice("combine", self.combine, ("add", "average", "gated"))
        _check_count("hidden_features", self.hidden_features, 1)
        if self.activation is not None:
            resolve_activation(self.activation)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One model's MoE layers: sizes, router, shared experts, and which layers they are.

    Args:
      features: model width D.
      hidden_features: width F of one routed expert.
      num_experts: routed experts E that have weights.
      num_experts_per_token: K.
      router: RouterConfig.
      shared: SharedConfig or None.
      activation: a name or an Activation.
      use_bias: experts have biases on both products.
      latent_features: width that the routed experts see, between a projection of the token and one
        of what they give back (Nemotron-H); None: they see D.
      num_layers: decoder layers of the model, 0 where not known.
      moe_layers: indices of those that are MoE.
      family: the public family's name (Hugging Face ``model_type``), or "".
    """

    features: int
    hidden_features: int
    num_experts: int
    num_experts_per_token: int
    router: RouterConfig = RouterConfig()
    shared: SharedConfig | None = None
    activation: str | Activation = "silu"
    use_bias: bool = False
    latent_features: int | None = None
    num_layers: int = 0
    moe_layers: tuple[int, ...] = ()
    family: str = ""

    def __post_init__(self):
        _check_type("router", self.router, RouterConfig)
        _check_type("shared", self.shared, SharedConfig, type(None))
        for name in ("features", "hidden_features", "num_experts"):
            _check_count(name, getattr(self, name), 1)
        if self.latent_features is not None:
            _check_count("latent_features", self.latent_features, 1)
        for name in ("num_experts_per_token", "num_layers"):
            _check_count(name, getattr(self, name), 0)
        _check_bool("use_bias", self.use_bias)
        _check_type("family", self.family, str)
        _check_type("moe_layers", self.moe_layers, tuple)
        for layer in self.moe_layers:
            _check_type("a layer of moe_layers", layer, numbers.Integral)
        check_experts_per_token(self.num_experts_per_token, self.num_experts, self.router)
        resolve_activation(self.activation)
        layers = self.moe_layers
        if any(first >= second for first, second in itertools.pairwise(layers)):
            raise ValueError(f"moe_layers must rise, got {layers}")
        if layers and not (
            layers[0] >= 0 and (layers[-1] < self.num_layers or not self.num_layers)
        ):
            raise ValueError(
                f"moe_layers must be indices of layers, num_layers={self.num_layers}, got {layers}"
            )

    @property
    def expert_features(self) -> int:
        """The width of the routed experts' inputs and outputs."""
        return self.latent_features or self.features

    @classmethod
    def from_hf(cls, source: _Path | tp.Mapping[str, tp.Any]) -> "MoEConfig":
        """Reads a Hugging Face configuration.

        Args:
          source: a model directory, a ``config.json``, or its parsed dict.

        Raises:
          ValueError: the ``model_type`` is not known (the message lists the known ones), or a
            field that the family needs is missing.
        """
        from moe_flax.checkpoint import families

        return families.config_from_hf(source)

    @classmethod
    def preset(cls, name: str) -> "MoEConfig":
        """Returns a named public model's configuration, from ``configs/<name>.toml``.

        Raises:
          ValueError: no such preset; the message lists them all.
        """
        directory = _preset_directory()
        path = directory / f"{name}.toml"
        if name not in preset_names():
            raise ValueError(f"no preset {name!r}; known presets: {', '.join(preset_names())}")
        return cls.from_dict(tomllib.loads(path.read_text()))

    def to_dict(self) -> dict[str, tp.Any]:
        """Plain dicts, lists, numbers and strings; ``from_dict`` gives back an equal config."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: tp.Mapping[str, tp.Any]) -> "MoEConfig":
        """The inverse of ``to_dict``; absent fields take their defaults.

        Raises:
          ValueError: a key is not a field (the message lists the fields), or a value is out of
            range.
          TypeError: a value is of another type than its field.
        """
        values = {key: value for key, value in values.items() if key != "source"}
        if "router" in values:
            values["router"] = _build(RouterConfig, values["router"])
        if values.get("shared") is not None:
            values["shared"] = _build(SharedConfig, values["shared"])
        if isinstance(values.get("moe_layers"), list):
            values["moe_layers"] = tuple(values["moe_layers"])
        return _build(cls, values)


def preset_names() -> tuple[str, ...]:
    """The names ``MoEConfig.preset`` takes, sorted."""
    return tuple(sorted(path.stem for path in _preset_directory().glob("*.toml")))


def check_experts_per_token(k: int, num_experts: int, router: RouterConfig) -> None:
    """Raises a ValueError unless K experts can be chosen for a token."""
    if num_experts < 1:
        raise ValueError(
            f"num_experts must be >= 1 beside num_identity_experts={router.num_identity_experts},"
            f" got {num_experts}"
        )
    if router.selection == "sparse_mixer" and k != 2:
        raise ValueError(f"selection 'sparse_mixer' takes num_experts_per_token=2, got {k}")
    total = num_experts + router.num_identity_experts
    if total % router.num_groups:
        raise ValueError(f"{total} experts do not divide into num_groups={router.num_groups}")
    available = total // router.num_groups * router.num_selected_groups
    if not 1 <= k <= available:
        raise ValueError(
            f"num_experts_per_token must be between 1 and {available}"
            f" (experts that a token may choose from), got {k}"
        )


def _preset_directory() -> pathlib.Path:
    here = pathlib.Path(__file__).parent
    installed = here / "configs"  # where the wheel puts them
    return installed if installed.is_dir() else here.parent / "configs"


def _plain(value: tp.Any) -> tp.Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _build(cls: tp.Any, values: tp.Any) -> tp.Any:
    """Makes a config dataclass from a mapping, nested activations included."""
    if isinstance(values, cls):
        return values
    _check_type(f"a {cls.__name__}", values, Mapping)
    fields = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - fields)
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {unknown}; fields: {sorted(fields)}")
    needed = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if needed:
        raise ValueError(f"{cls.__name__} needs {needed}, got {sorted(values)}")
    values = dict(values)
    if isinstance(values.get("activation"), tp.Mapping):
        values["activation"] = _build(Activation, values["activation"])
    return cls(**values)

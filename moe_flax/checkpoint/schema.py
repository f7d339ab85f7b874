"""What a row of the family table is made of: config fields, layer rules, key templates."""

import dataclasses
import typing as tp

from moe_flax.activations import ACTIVATIONS, Activation
from moe_flax.checkpoint.errors import fault

Values: tp.TypeAlias = tp.Mapping[str, tp.Any]
_MISSING: tp.Final = object()


def lookup(values: Values, name: str) -> tp.Any:
    """A config value by its dotted name, or None where it is absent or null."""
    found: tp.Any = values
    for part in name.split("."):
        if not isinstance(found, tp.Mapping) or found.get(part) is None:
            return None
        found = found[part]
    return found


@dataclasses.dataclass(frozen=True)
class Field:
    """A value in config.json.

    Args:
      names: where it may stand, the family's own name first; those present must agree.
      default: the family's value where none is present; without one, absence is an error.
      null: the value of an explicit null; by default the same as absence.
      choices: what stored values mean; any other is an error. None takes the value itself.
      when: (name, values): the field counts only where that config value is one of these.
      otherwise: what it is where it does not count.
      cast: "bool" for whether the value is other than 0; "complement" for 1 minus it.
      length_of: the name of a list whose length it is where it is absent.
      leading: (name, default, value, rest): where it is absent, the first so many layers (that
        field, or its default) have ``value`` and the others ``rest``.
    """

    names: tuple[str, ...]
    default: tp.Any = _MISSING
    null: tp.Any = _MISSING
    choices: tp.Mapping[tp.Any, tp.Any] | None = None
    when: tuple[str, tuple[tp.Any, ...]] | None = None
    otherwise: tp.Any = None
    cast: tp.Literal["bool", "complement"] | None = None
    length_of: str = ""
    leading: tuple[str, int, tp.Any, tp.Any] | None = None

    def read(self, values: Values, layer: int | None = None) -> tp.Any:
        """The value; a list holds one a layer. Raises a CheckpointError naming the field."""
        if self.when is not None and lookup(values, self.when[0]) not in self.when[1]:
            return self.otherwise
        found = {name: self._at(lookup(values, name), layer) for name in self.names}
        found = {name: value for name, value in found.items() if value is not None}
        if not found and self.leading is not None and layer is not None:
            name, default, value, rest = self.leading
            return value if layer < (lookup(values, name) or default) else rest
        if not found:
            return self._absent(values)
        first, *others = found.values()
        if any(value != first for value in others if type(value) is type(first)):
            raise fault(f"config.json contradicts itself: {found}")
        if self.choices is not None:
            if not isinstance(first, str | int | float | bool) or first not in self.choices:
                known = sorted(self.choices, key=str)
                raise fault(f"config.json has {self.names[0]}={first!r}; known: {known}")
            first = self.choices[first]
        return self._cast(first)

    @staticmethod
    def _at(value: tp.Any, layer: int | None) -> tp.Any:
        if layer is not None and isinstance(value, list) and layer < len(value):
            return value[layer]
        return value

    def _absent(self, values: Values) -> tp.Any:
        if self.null is not _MISSING and any(_is_null(values, name) for name in self.names):
            return self.null
        listed = lookup(values, self.length_of) if self.length_of else None
        if isinstance(listed, list):
            return len(listed)
        if self.default is _MISSING:
            raise fault(f"config.json has no {' or '.join(self.names)}")
        return self._cast(self.default)

    def _cast(self, value: tp.Any) -> tp.Any:
        try:
            return (
                value
                if self.cast is None
                else 1 - value
                if self.cast == "complement"
                else bool(value)
            )
        except TypeError:
            raise fault(f"config.json has {self.names[0]}={value!r}; expected a number") from None

    def write(self, value: tp.Any) -> tp.Any:
        """The stored value that reads back as this one."""
        if self.choices is not None:
            return next((k for k, v in self.choices.items() if v == value), value)
        if self.cast == "bool":
            return value if value or self.null is _MISSING else None
        return 1 - value if self.cast == "complement" else value


def _is_null(values: Values, name: str) -> bool:
    *parents, last = name.split(".")
    inner = lookup(values, ".".join(parents)) if parents else values
    return isinstance(inner, tp.Mapping) and last in inner and inner[last] is None


def field(*names: str, **kwargs: tp.Any) -> Field:
    """Short for ``Field(names, ...)``."""
    return Field(names, **kwargs)


def read(value: tp.Any, values: Values, layer: int | None = None) -> tp.Any:
    """A table cell's value: a Field is read from the config, anything else is a constant."""
    return value.read(values, layer) if isinstance(value, Field) else value


FUNCTIONS: tp.Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclasses.dataclass(frozen=True)
class Act:
    """A family's expert activation; see `moe_flax.Activation` for the arguments."""

    function: Field | str = Field(("hidden_act",), default="silu", choices=FUNCTIONS)
    alpha: Field | float = 1.0
    up_offset: float = 0.0
    limit: Field | float | None = None
    clamp: tp.Literal["before", "after"] = "before"
    gated: bool = True

    def read(self, values: Values, layer: int | None = None) -> str | Activation:
        """The activation, by its short name where it has one."""
        limit = read(self.limit, values, layer)
        activation = Activation(
            function=read(self.function, values, layer),
            alpha=float(read(self.alpha, values, layer)),
            up_offset=self.up_offset,
            limit=float(limit) if limit else None,  # 0 stands for none (Step-3)
            clamp=self.clamp,
            gated=self.gated,
        )
        return next(
            (name for name, known in ACTIVATIONS.items() if known == activation), activation
        )


@dataclasses.dataclass(frozen=True)
class Shared:
    """A family's shared experts: one FFN of ``count * width`` features; 0 means none."""

    width: Field
    count: Field | int = 1
    combine: Field | str = "add"
    activation: Act | None = None


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """Which layers are MoE: a list of types, else a list of indices, else arithmetic.

    Args:
      types: the field that lists each layer's type, or gives it as a string of letters.
      moe_type: the type that means MoE.
      indices: the field that lists MoE layers, or gives them as a comma-separated string.
      first, last: the first and last layer that may be MoE; a negative last means the end.
      period, phase: layer i is MoE where ``i % period == phase % period``.
      excluded: the field that lists layers which are not MoE in spite of the rest.
    """

    types: Field | None = None
    moe_type: tuple[str | int, ...] = ("sparse",)
    indices: Field | None = None
    first: Field | int = 0
    last: Field | int = -1
    period: Field | int = 1
    phase: Field | int = 0
    excluded: Field | None = None

    def read(self, values: Values, num_layers: int) -> tuple[int, ...]:
        """The indices of the MoE layers, ascending."""
        types = read(self.types, values)
        if types:
            if len(types) < num_layers:
                raise fault(f"config.json types {len(types)} layers, the model has {num_layers}")
            return tuple(i for i in range(num_layers) if types[i] in self.moe_type)
        indices = read(self.indices, values)
        if indices is not None:
            if isinstance(indices, str):
                indices = [int(i) for i in indices.split(",") if i.strip()]
            return tuple(sorted(i for i in indices if i < num_layers))
        period = read(self.period, values)
        if period < 1:  # Switch and NLLB: a step of 0 is a model without MoE layers
            return ()
        last = read(self.last, values)
        last = num_layers - 1 if last < 0 else min(last, num_layers - 1)
        phase, excluded = read(self.phase, values), read(self.excluded, values) or ()
        return tuple(
            i
            for i in range(read(self.first, values), last + 1)
            if i % period == phase % period and i not in excluded
        )


@dataclasses.dataclass(frozen=True)
class Stack:
    """A run of layers: where their keys start, how many there are, which are MoE.

    Args:
      prefixes: key prefixes with ``{layer}``; a checkpoint uses one of them.
      num_layers: how many layers.
      rule: which are MoE.
    """

    prefixes: tuple[str, ...] = (
        "model.layers.{layer}.",
        "model.language_model.layers.{layer}.",
        "language_model.model.layers.{layer}.",
        "layers.{layer}.",
        "language_model.layers.{layer}.",
    )
    num_layers: Field = Field(("num_hidden_layers",))
    rule: LayerRule = LayerRule()


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one parameter lies in the files.

    Args:
      parameter: its name here, such as "experts.wi".
      key: the stored name after the layer's prefix. ``{E}`` and ``{J}`` in it run over experts
        and branches, one tensor each. None: the files have no such tensor, it is zero.
      axes: the stored tensor's layout (see `layouts`). An E that the parameter has and neither
        key nor axes name is one value that all experts share.
      branches: what ``{J}`` becomes: gate, then up.
    """

    parameter: str
    key: str | None
    axes: str
    branches: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """One way in which a family's layer lies on disk; known by its keys, never by a shape.

    Args:
      name: what `load` and `save` call it.
      entries: where each parameter lies.
      prefix: the layer prefix that it is written under, where that is not the family's first.
      floats: the form that its weights go to as floats, where it holds quantized ones alone.
      on_request: its keys are those of another form, so it is taken only where asked for by name.
    """

    name: str
    entries: tuple[Entry, ...]
    prefix: str = ""
    on_request: bool = False
    floats: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """One public model family.

    Args:
      model_types: the ``model_type`` values that it reads; the first names it.
      forms: its on-disk forms, the one that its own checkpoints use first.
      features, hidden, experts, top_k: the fields for D, F, E and K.
      router: RouterConfig arguments, each a constant or a Field.
      activation, shared: see there.
      use_bias: experts have biases.
      latent: the field for the width between two projections around the routed experts.
      stacks: runs of layers; two for encoder-decoder models, whose layers count on.
      expects: config values that, where present, must be one of these; others have another
        meaning that the family's row does not describe.
      passed: keys of the layer's own that belong to no parameter and pass through.
      note: what a caller has to know beyond the layer.
    """

    model_types: tuple[str, ...]
    forms: tuple[Form, ...]
    hidden: Field
    experts: Field
    top_k: Field | int = Field(("num_experts_per_tok", "num_experts_per_token"))
    features: Field = Field(("hidden_size",))
    router: tp.Mapping[str, tp.Any] = dataclasses.field(default_factory=dict)
    activation: Act = Act()
    shared: Shared | None = None
    use_bias: bool = False
    latent: Field | None = None
    stacks: tuple[Stack, ...] = (Stack(),)
    expects: tp.Mapping[str, tuple[tp.Any, ...]] = dataclasses.field(default_factory=dict)
    passed: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """The first of its model types."""
        return self.model_types[0]

    def routes(self, name: str) -> bool:
        """Whether a tensor outside of the known layers is a router's, by its name."""
        keys = {e.key for f in self.forms for e in f.entries if e.parameter.startswith("router.")}
        return name.endswith(tuple(f".{key}" for key in keys if key))

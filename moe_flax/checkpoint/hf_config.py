"""config.json to `MoEConfig` and back, as a family's row says."""

import collections
import dataclasses
import os
import pathlib
import typing as tp

import ml_dtypes
import numpy as np

from moe_flax.activations import resolve_activation
from moe_flax.checkpoint.errors import CheckpointError, fault
from moe_flax.checkpoint.reader import parse_json
from moe_flax.checkpoint.schema import Act, Family, Field, Stack, Values, lookup, read
from moe_flax.config import MoEConfig, RouterConfig, SharedConfig

_MAX_LAYERS, _MAX_EXPERTS = 10_000, 100_000  # more is a broken file, and would fill the memory
_FLOATS: tp.Final = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("float32", np.float32),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
    )
}
NESTED: tp.Final = ("text_config", "thinker_config", "language_config", "llm_config")


def load_json(source: str | os.PathLike[str] | Values) -> dict[str, tp.Any]:
    """A configuration's dict, from a model directory, a ``config.json``, or itself."""
    if isinstance(source, tp.Mapping):
        return dict(source)
    path = pathlib.Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise fault(f"cannot be read ({error.strerror})", file=path) from None


def float_dtype(values: Values) -> np.dtype:
    """The dtype that config.json says the model's floats have; bfloat16 where it says none."""
    inner = (values[n] for n in NESTED if isinstance(values.get(n), tp.Mapping))
    for part in (values, *inner):
        for name in ("dtype", "torch_dtype"):
            found = str(part.get(name)).removeprefix("torch.")
            if found in _FLOATS:
                return _FLOATS[found]
    return _FLOATS["bfloat16"]


def text_values(values: Values, known: tp.Container[tp.Any]) -> tuple[str, Values]:
    """The model type that is in the table, and the part of the config that describes it."""
    found = values
    while True:
        inner = next((found[n] for n in NESTED if isinstance(found.get(n), tp.Mapping)), None)
        if inner is None or (_model_type(found) in known and "hidden_size" in found):
            break
        found = {"model_type": found.get("model_type"), **inner}
        if _model_type(inner) not in known and _model_type(values) in known:
            found["model_type"] = values["model_type"]
    return _model_type(found), found


def _model_type(values: Values) -> str:
    name = values.get("model_type")
    return name if isinstance(name, str) else ""


def stack_layers(family: Family, values: Values) -> list[tuple[Stack, int, tuple[int, ...]]]:
    """A family's runs of layers: each with its length and its MoE layers from its own 0 on."""
    runs = []
    for stack in family.stacks:
        count = _integer(stack.num_layers.read(values), stack.num_layers, _MAX_LAYERS)
        runs.append((stack, count, stack.rule.read(values, count)))
    return runs


def read_config(family: Family, values: Values, layer: int | None = None) -> MoEConfig:
    """Reads one layer's configuration, that of most MoE layers where none is named.

    Raises:
      CheckpointError: a field is missing, contradicts another, or has a value that the row does
        not know.
    """
    for name, allowed in family.expects.items():
        value = lookup(values, name)
        if value is not None and value not in allowed:
            known = " or ".join(map(repr, allowed)) or "none"
            raise fault(f"config.json has {name}={value!r}; {family.name} is known with {known}")
    moe_layers, offset = [], 0
    for _, count, indices in stack_layers(family, values):
        moe_layers += [offset + index for index in indices]
        offset += count
    if layer is None:
        configs = [read_config(family, values, index) for index in moe_layers or (0,)]
        return collections.Counter(configs).most_common(1)[0][0]

    def number(cell: tp.Any) -> int:
        return _integer(read(cell, values, layer), cell)

    shared = None
    if family.shared is not None:
        width = number(family.shared.count) and number(family.shared.width)
        width *= number(family.shared.count)
        if width:
            act = family.shared.activation
            shared = SharedConfig(
                hidden_features=width,
                combine=read(family.shared.combine, values, layer),
                activation=act.read(values, layer) if act else None,
            )
    try:
        return MoEConfig(
            features=number(family.features),
            hidden_features=number(family.hidden),
            num_experts=_integer(read(family.experts, values, layer), family.experts, _MAX_EXPERTS),
            num_experts_per_token=number(family.top_k),
            router=RouterConfig(**{k: read(v, values, layer) for k, v in family.router.items()}),
            shared=shared,
            activation=family.activation.read(values, layer),
            use_bias=family.use_bias,
            latent_features=read(family.latent, values, layer),
            num_layers=offset,
            moe_layers=tuple(moe_layers),
            family=family.name,
        )
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise fault(f"config.json does not describe an MoE layer: {error}") from None


def _integer(value: tp.Any, cell: tp.Any, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        name = cell.names[0] if isinstance(cell, Field) else "a constant"
        raise fault(
            f"config.json has {name}={value!r}; expected a non-negative integer up to {most}"
        )
    return value


class _Writer:
    """Collects the values of config.json from table cells; the first word on a field stands."""

    def __init__(self, model_type: str):
        self.values: dict[str, tp.Any] = {"model_type": model_type}

    def put(self, cell: tp.Any, value: tp.Any) -> None:
        """Writes the field so that it reads as ``value``; constants need no field."""
        if not isinstance(cell, Field) or (cell.cast == "bool" and value):
            return  # a number that is not 0 follows from another cell
        if cell.when is not None and value != cell.otherwise:
            self._set(cell.when[0], cell.when[1][0])
        self._set(cell.names[0], cell.write(value))

    def _set(self, name: str, value: tp.Any) -> None:
        *parents, last = name.split(".")
        target = self.values
        for parent in parents:
            target = target.setdefault(parent, {})
        target.setdefault(last, value)


def write_config(family: Family, config: MoEConfig) -> dict[str, tp.Any]:
    """The fields of config.json that make `read_config` give this configuration.

    Raises:
      CheckpointError: the family's fields cannot say it; the message lists what differs.
    """
    writer = _Writer(family.name)
    writer.put(family.features, config.features)
    writer.put(family.hidden, config.hidden_features)
    writer.put(family.experts, config.num_experts)
    writer.put(family.top_k, config.num_experts_per_token)
    if config.latent_features is not None:
        writer.put(family.latent, config.latent_features)
    for name, cell in family.router.items():
        writer.put(cell, getattr(config.router, name))
    _put_activation(writer, family.activation, config.activation)
    _put_shared(writer, family, config)
    count = config.num_layers // len(family.stacks)
    for i, stack in enumerate(family.stacks):
        writer.put(stack.num_layers, count)
        moe = [j - i * count for j in config.moe_layers if i * count <= j < (i + 1) * count]
        _put_layers(writer, stack, count, moe)
    written = read_config(family, writer.values)
    wanted = dataclasses.replace(config, family=family.name)
    if written != wanted:
        raise fault(f"family {family.name} cannot express {_difference(wanted, written)}")
    return writer.values


def rewrite_config(family: Family, config: MoEConfig, values: Values) -> dict[str, tp.Any]:
    """`write_config` for a model that had another family's config.json, ``values``.

    Whether its embeddings are its head as well goes with it: families differ in what they take
    for granted.
    """
    tied = lookup(values, "tie_word_embeddings")
    written = write_config(family, config)
    return written if tied is None else written | {"tie_word_embeddings": tied}


def _difference(wanted: tp.Any, written: tp.Any) -> str:
    """The fields in which two dataclasses differ, with both values."""
    found = []
    for f in dataclasses.fields(wanted):
        a, b = getattr(wanted, f.name), getattr(written, f.name)
        if a != b and isinstance(a, RouterConfig):
            found.append(f"router: {_difference(a, b)}")
        elif a != b:
            found.append(f"{f.name}={a!r} (would read {b!r})")
    return "; ".join(found)


def _put_activation(writer: _Writer, act: Act, given: tp.Any) -> None:
    activation = resolve_activation(given)
    writer.put(act.function, activation.function)
    writer.put(act.alpha, activation.alpha)
    if activation.limit is not None:
        writer.put(act.limit, activation.limit)


def _put_shared(writer: _Writer, family: Family, config: MoEConfig) -> None:
    if family.shared is None:
        return
    width, count = config.shared.hidden_features if config.shared else 0, family.shared.count
    if isinstance(count, Field):  # as n experts of the routed width where that divides
        unit = lookup(writer.values, family.shared.width.names[0])
        unit = unit if unit and width % unit == 0 else width
        writer.put(count, width // unit if unit else 0)
        width = unit
    writer.put(family.shared.width, width)
    if config.shared is not None:
        writer.put(family.shared.combine, config.shared.combine)
        if family.shared.activation and config.shared.activation:
            _put_activation(writer, family.shared.activation, config.shared.activation)


def _put_layers(writer: _Writer, stack: Stack, count: int, moe: list[int]) -> None:
    rule = stack.rule
    if isinstance(rule.types, Field):
        writer.put(rule.types, [rule.moe_type[0] if i in moe else "dense" for i in range(count)])
    elif isinstance(rule.indices, Field):
        writer.put(rule.indices, moe)
    elif rule.excluded is not None:
        writer.put(rule.period, 1)
        writer.put(rule.excluded, [i for i in range(count) if i not in moe])
    elif moe:  # arithmetic: from the first on, or with a step
        step = moe[1] - moe[0] if len(moe) > 1 else count
        for first, period in ((moe[0], 1), (moe[0], step), (0, step)):
            trial = _Writer("")
            trial.put(rule.first, first)
            trial.put(rule.last, moe[-1] if moe[-1] < count - 1 else -1)
            trial.put(rule.period, period)
            trial.put(rule.phase, moe[0] % period)
            if list(rule.read(trial.values, count)) == moe:
                writer.values.update(trial.values | {"model_type": writer.values["model_type"]})
                return

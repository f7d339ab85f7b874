"""A checkpoint on disk, opened: its family, and which tensors are which layer's parameters."""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import typing as tp

from moe_flax.checkpoint import families
from moe_flax.checkpoint.errors import CheckpointError, fault, reading_config
from moe_flax.checkpoint.hf_config import load_json, read_config, stack_layers
from moe_flax.checkpoint.mapping import (
    Binding,
    StoredParameter,
    Tensors,
    axis_sizes,
    parameter_shapes,
)
from moe_flax.checkpoint.quantized import Logical, QuantizedTensor
from moe_flax.checkpoint.reader import Reader
from moe_flax.checkpoint.schema import Entry, Family, Form, Values, lookup
from moe_flax.config import MoEConfig

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed.weight", "embeddings.weight")
_HEADS = ("lm_head.weight", "head.weight", "output.weight", "unembedding.weight")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One MoE layer of a checkpoint: its configuration, its form, and where its parameters lie."""

    index: int
    config: MoEConfig
    prefix: str
    form: Form
    bindings: dict[str, Binding]

    @property
    def keys(self) -> frozenset[str]:
        """Every stored tensor that the layer's parameters take."""
        return frozenset(key for binding in self.bindings.values() for key in binding.keys)


@functools.cache
def _pattern(key: str, branches: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, branches)) or "(?!)"
    return re.compile(
        re.escape(key).replace(r"\{E\}", r"(?P<expert>\d+)").replace(r"\{J\}", f"(?:{names})")
    )


def _root(key: str) -> str:
    """The part of a key template that all of its tensors, and no other parameter's, start with."""
    key = re.split(r"\{[EJ]\}", key)[0]
    return key[: key.rindex(".") + 1] if "." in key else key


class Source:
    """Opens a checkpoint directory.

    Args:
      tensors: its tensors by name.
      hf_config: its parsed config.json.
      file: what errors call the checkpoint.
      form: the name of the on-disk form, where keys do not tell it.
      only: look at this layer alone.

    Attributes:
      family, config: its row of the table, and the configuration of most of its MoE layers.
      layers: the MoE layers by index, each checked: no tensor missing, none left over.
      rest: names of the tensors that belong to no MoE parameter, in the checkpoint's order.
      beyond: layer indices past the configuration's last (multi-token prediction); their tensors
        are in ``rest``.
    """

    def __init__(
        self,
        tensors: Tensors,
        hf_config: Values,
        *,
        file: str | os.PathLike[str] = "",
        form: str | None = None,
        only: int | None = None,
    ):
        self.tensors, self.hf_config, self.file = tensors, dict(hf_config), file
        with reading_config(file):
            self.family, self.values = families.resolve(hf_config)
            self.config = read_config(self.family, self.values)
            runs = stack_layers(self.family, self.values)
        self._wanted_form = form
        if form is not None and form not in [f.name for f in self.family.forms]:
            names = ", ".join(f.name for f in self.family.forms)
            raise fault(
                f"family {self.family.name} has no form {form!r}; it has {names}", file=file
            )
        self._groups: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
        for name in tensors:
            match = _LAYER.search(name)
            if match:
                self._groups[name[: match.start(1)], int(match.group(1))].append(name)
        self.layers: dict[int, Layer] = {}
        self.beyond: list[int] = []
        offset = 0
        for stack, count, indices in runs:
            heads = [prefix.split("{layer}")[0] for prefix in stack.prefixes]
            self.beyond += sorted({n for head, n in self._groups if head in heads and n >= count})
            for index in indices:
                if only not in (None, offset + index):
                    continue
                self.layers[offset + index] = self._bind(stack.prefixes, index, offset + index)
            self._refuse_hidden_experts(stack.prefixes, count, indices, offset)
            offset += count
        taken = {key for layer in self.layers.values() for key in layer.keys}
        self.rest = [name for name in tensors if name not in taken]

    def layer(self, index: int) -> Layer:
        """The MoE layer of an index; an error lists those there are."""
        if index not in self.layers:
            raise fault(
                f"layer {index} is no MoE layer; those are {self.config.moe_layers}", file=self.file
            )
        return self.layers[index]

    def parameters(self, index: int) -> dict[str, StoredParameter]:
        """The parameters of a layer, by name, read when asked."""
        layer = self.layer(index)
        return {name: StoredParameter(b, self.tensors) for name, b in layer.bindings.items()}

    @property
    def quantized(self) -> tp.Mapping[str, QuantizedTensor]:
        """Those of its tensors that are stored quantized."""
        return self.tensors.quantized if isinstance(self.tensors, Logical) else {}

    @property
    def stored(self) -> Tensors:
        """The tensors as they are stored."""
        return self.tensors.stored if isinstance(self.tensors, Logical) else self.tensors

    def check_head(self) -> None:
        """Raises a CheckpointError where a whole language model has lost its head.

        Embeddings that are not tied and no ``lm_head``: whoever loads the model would run it with
        a random one.
        """
        models = self.hf_config.get("architectures")
        tied = lookup(self.hf_config, "tie_word_embeddings")
        tied = lookup(self.values, "tie_word_embeddings") if tied is None else tied
        whole = isinstance(models, list) and any(str(m).endswith(_WITH_HEAD) for m in models)
        if tied is not False or not whole:
            return
        embedding = next((n for n in self.tensors if n.endswith(_EMBEDDINGS)), None)
        if embedding and not any(n.endswith(_HEADS) for n in self.tensors):
            raise fault(
                f"config.json has tie_word_embeddings=False, and there is {embedding!r} but no"
                " lm_head.weight; add it or correct config.json (load_layer reads single layers)",
                file=self.file,
            )

    def _bind(self, prefixes: tuple[str, ...], number: int, index: int) -> Layer:
        """Finds a layer's prefix and form by its keys, and checks that they are all there."""
        with reading_config(self.file):
            config = read_config(self.family, self.values, index)
        found: dict[tuple[str, str], Form] = {}
        names: dict[str, list[str]] = {}
        for template in prefixes:
            head, tail = template.split("{layer}")
            prefix = f"{head}{number}{tail}"
            names[prefix] = [
                name[len(prefix) :]
                for name in self._groups.get((head, number), ())
                if name.startswith(prefix)
            ]
            for form in self.family.forms:
                if names[prefix] and self._has_experts(form, names[prefix]):
                    found[prefix, form.name] = form
        if self._wanted_form is not None:
            found = {k: f for k, f in found.items() if f.name == self._wanted_form}
        else:
            found = {k: f for k, f in found.items() if not f.on_request}
        if len({prefix for prefix, _ in found}) > 1:
            raise fault(f"layer {index} is there twice, under {sorted(found)}", file=self.file)
        if len(found) > 1:
            forms = " and ".join(form.name for form in found.values())
            raise fault(f"layer {index} holds its experts in two forms, {forms}", file=self.file)
        if not found:
            wanted = self.family.forms[0].entries
            keys = [prefixes[0].format(layer=number) + str(e.key) for e in wanted if _is_expert(e)]
            raise fault(
                f"layer {index} has no expert tensors; expected such as {', '.join(keys)}",
                file=self.file,
            )
        (((prefix, _), form),) = found.items()
        with reading_config(self.file):
            layer = _layer(index, config, prefix, form)
        self._check(layer, [prefix + name for name in names[prefix]])
        return layer

    def _refuse_hidden_experts(
        self, prefixes: tuple[str, ...], count: int, moe: tuple[int, ...], offset: int
    ) -> None:
        """A layer that the configuration calls dense may hold no experts."""
        for template, number in itertools.product(prefixes, set(range(count)) - set(moe)):
            head, tail = template.split("{layer}")
            prefix = f"{head}{number}{tail}"
            names = [n for n in self._groups.get((head, number), ()) if n.startswith(prefix)]
            for form in self.family.forms:
                if self._has_experts(form, [name[len(prefix) :] for name in names]):
                    raise fault(
                        f"layer {offset + number} holds experts, config.json makes it dense;"
                        f" its MoE layers are {self.config.moe_layers}",
                        file=self.file,
                    )

    @staticmethod
    def _has_experts(form: Form, names: list[str]) -> bool:
        patterns = [_pattern(e.key, e.branches) for e in form.entries if _is_expert(e) and e.key]
        return any(pattern.fullmatch(name) for name in names for pattern in patterns)

    def _check(self, layer: Layer, names: list[str]) -> None:
        """No tensor of the layer's parameters may be missing, left over, or of another shape."""
        keys, present = layer.keys, set(names)
        missing = [key for key in keys if key not in present]
        if missing:
            raise self._fault(f"missing from layer {layer.index}", missing)
        roots = tuple(
            layer.prefix + _root(e.key) for e in layer.form.entries if e.key and _root(e.key)
        )
        passed = {layer.prefix + key for key in self.family.passed}
        extra = [n for n in names if n.startswith(roots) and n not in keys and n not in passed]
        if extra:
            experts = layer.config.num_experts
            raise self._fault(
                f"belongs to no parameter of layer {layer.index} ({experts} experts,"
                f" form {layer.form.name})",
                extra,
            )
        if getattr(self.tensors, "names_only", False):
            return
        for binding in layer.bindings.values():
            for key in binding.keys:
                shape = tuple(self.tensors[key].shape)
                if shape != binding.stored_shape:
                    raise self._fault(
                        f"has shape {shape}, config.json makes it {binding.stored_shape}"
                        f" ({binding.entry.axes})",
                        [key],
                    )

    def _fault(self, problem: str, names: tp.Iterable[str]) -> CheckpointError:
        names = sorted(names, key=_numeric)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return fault(problem + more, file=self.file, tensor=names[0])


def _numeric(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def _is_expert(entry: Entry) -> bool:
    return entry.parameter in ("experts.wi", "experts.wo")


def _layer(index: int, config: MoEConfig, prefix: str, form: Form) -> Layer:
    """Binds a form's entries to the parameters that the configuration has."""
    entries = {entry.parameter: entry for entry in form.entries}
    wanted = parameter_shapes(config)
    lacking = [name for name in wanted if name not in entries]
    if lacking:
        raise fault(f"form {form.name} of {config.family} has no place for {lacking}")
    bindings = {name: Binding(entries[name], prefix, axis_sizes(config, name)) for name in wanted}
    return Layer(index, config, prefix, form, bindings)


def bind(
    family: Family,
    form: Form,
    config: MoEConfig,
    index: int,
    num_layers: int,
    origin: Layer | None = None,
) -> Layer:
    """Where a layer goes in a new checkpoint of the family.

    Args:
      family, form: what to write.
      config: the layer's configuration.
      index, num_layers: which layer it is, of how many; an encoder-decoder has half of them each.
      origin: where it was in a checkpoint of the same family, whose prefix stays.
    """
    if origin is not None and not form.prefix and not origin.form.prefix:
        return _layer(index, config, origin.prefix, form)
    stacks = family.stacks
    each = max(num_layers // len(stacks), 1)
    stack = stacks[min(index // each, len(stacks) - 1)]
    number = index if len(stacks) == 1 else index % each
    prefix = (form.prefix or stack.prefixes[0]).format(layer=number)
    return _layer(index, config, prefix, form)


def open_source(
    path: str | os.PathLike[str], *, form: str | None = None, only: int | None = None
) -> Source:
    """Opens a checkpoint directory; see `Source`."""
    hf_config = load_json(path)
    tensors = Logical(Reader(path), hf_config, pathlib.Path(path))
    return Source(tensors, hf_config, file=pathlib.Path(path), form=form, only=only)

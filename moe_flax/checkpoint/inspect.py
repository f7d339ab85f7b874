"""What a checkpoint holds, from its configuration and headers alone."""

import collections
import collections.abc
import dataclasses
import math
import os
import pathlib
import typing as tp

import numpy as np

from moe_flax.checkpoint.errors import fault, reading_config
from moe_flax.checkpoint.hf_config import load_json
from moe_flax.checkpoint.quantized import Logical, formats_of
from moe_flax.checkpoint.reader import INDEX_NAME, Reader, read_index
from moe_flax.checkpoint.source import Source
from moe_flax.checkpoint.transform import ranges

_COMPANIONS: tp.Final = (
    "_scale_inv", "_scale", "_scales", ".scales", "_scale_2", "_global_scale", "_shape",
    "input_scale", "_zero_point", ".scale",
)  # fmt: skip


class Names(collections.abc.Mapping[str, tp.Any]):
    """Tensors known by name only, from an index whose shards are not there.

    Companions of quantized tensors are left out, as `quantized.Logical` would hide them.
    """

    names_only = True

    def __init__(self, directory: pathlib.Path, quantized: bool):
        names = read_index(directory, directory / INDEX_NAME)
        hidden = {n for n in names if quantized and n.endswith(_COMPANIONS) and "router" not in n}
        self._names = dict.fromkeys(n.removesuffix("_packed") for n in names if n not in hidden)

    def __getitem__(self, name: str) -> tp.Any:
        raise fault("its shard is not there", tensor=name)

    def __iter__(self) -> tp.Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def inspect(path: str | os.PathLike[str]) -> list[str]:
    """Describes a checkpoint in lines of text.

    Args:
      path: a directory with config.json and either its safetensors files or their index alone.

    Raises:
      CheckpointError: what `Source` raises.
    """
    directory = pathlib.Path(path)
    hf_config = load_json(directory)
    with reading_config(directory / "config.json"):
        formats = formats_of(hf_config)
    index = directory / INDEX_NAME
    absent = index.exists() and not any(directory.glob("*.safetensors"))
    stored = None if absent else Reader(directory)
    tensors = (
        Names(directory, bool(formats)) if stored is None else Logical(stored, hf_config, directory)
    )
    source = Source(tensors, hf_config, file=directory)
    config = source.config
    forms = collections.Counter(layer.form.name for layer in source.layers.values())
    lines = [
        f"family       {source.family.name} (model_type {hf_config.get('model_type')})",
        f"layers       {len(source.layers)} MoE of {config.num_layers}:"
        f" {ranges(config.moe_layers)}",
        f"experts      {config.num_experts} of width {config.hidden_features},"
        f" {config.num_experts_per_token} a token, model width {config.features}",
        f"shared       {_shared(config.shared)}",
        f"activation   {config.activation}",
        f"router       {_router(config.router)}",
        f"form         {', '.join(f'{name} ({count} layers)' for name, count in forms.items())}",
        f"quantized    {', '.join(sorted(_formats(tensors) or {f.name for f in formats})) or 'no'}",
        f"passed on    {len(source.rest)} tensors{_examples(source.rest)}",
    ]
    if source.beyond:
        lines.append(
            f"beyond       layers {ranges(source.beyond)} are past the last one; passed on"
        )
    if source.family.note:
        lines.append(f"note         {source.family.note}")
    if stored is None:
        return [*lines, f"files        index only, {len(tensors)} tensors named"]
    return lines + _sizes(source, stored)


def _formats(tensors: tp.Any) -> set[str]:
    """The formats that are there, not only announced."""
    return {q.format.name for q in getattr(tensors, "quantized", {}).values()}


def _sizes(source: Source, stored: Reader) -> list[str]:
    """Files, bytes and dtypes, experts apart from the rest."""
    experts = {
        key
        for layer in source.layers.values()
        for name, binding in layer.bindings.items()
        if name.startswith("experts.")
        for key in binding.keys
    }
    quantized = source.tensors.quantized if isinstance(source.tensors, Logical) else {}
    held = {
        part for key in experts for part in (quantized[key].keys if key in quantized else (key,))
    }
    totals: dict[bool, collections.Counter[np.dtype]] = {
        True: collections.Counter(),
        False: collections.Counter(),
    }
    for name in stored:
        info = stored.info(name)
        totals[name in held][info.dtype] += math.prod(info.shape) * info.dtype.itemsize
    files = {stored.file(name) for name in stored}
    lines = [f"files        {len(files)}, {len(stored)} tensors"]
    for label, kind in (("in experts", True), ("elsewhere", False)):
        parts = [f"{dtype} {size(count)}" for dtype, count in totals[kind].most_common()]
        lines.append(f"{label:<12} {', '.join(parts) or 'nothing'}")
    return lines


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _shared(shared: tp.Any) -> str:
    return f"width {shared.hidden_features}, {shared.combine}" if shared else "none"


def _router(router: tp.Any) -> str:
    """What differs from a plain softmax."""
    default = type(router)()
    changed = [
        f"{f.name}={getattr(router, f.name)!r}"
        for f in dataclasses.fields(router)
        if getattr(router, f.name) != getattr(default, f.name) and f.name != "score"
    ]
    return ", ".join([router.score, *changed])


def _examples(names: tp.Sequence[str]) -> str:
    kinds = dict.fromkeys(".".join(p for p in name.split(".") if not p.isdigit()) for name in names)
    shown = list(kinds)[:4]
    return f": {', '.join(shown)}{', ...' if len(kinds) > 4 else ''}" if shown else ""

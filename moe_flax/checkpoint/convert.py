"""Loading MoE layers out of public checkpoints, and saving them back."""

import collections.abc
import dataclasses
import json
import os
import typing as tp

import numpy as np

from moe_flax import sharding
from moe_flax.checkpoint import families
from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.hf_config import rewrite_config
from moe_flax.checkpoint.kept import keep_parameters, kept_parameters
from moe_flax.checkpoint.mapping import Parameter, Tensors, read, turned
from moe_flax.checkpoint.modules import build_moe, mesh_axes, parameter_dtype
from moe_flax.checkpoint.outputs import module_outputs
from moe_flax.checkpoint.quantized import QuantizedTensor
from moe_flax.checkpoint.schema import Family, Form
from moe_flax.checkpoint.source import Layer, Source, bind, open_source
from moe_flax.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    array_output,
    write_checkpoint,
)
from moe_flax.config import MoEConfig
from moe_flax.kernels.backend import default_platform
from moe_flax.layers import MoE

Path: tp.TypeAlias = str | os.PathLike[str]
Quantized: tp.TypeAlias = tp.Literal["dequantize", "keep"]


class Rest(collections.abc.Mapping[str, np.ndarray]):
    """The tensors that are no MoE parameter, by name; memory-mapped, read when used."""

    def __init__(self, tensors: Tensors, names: tp.Iterable[str]):
        self._tensors, self._names = tensors, dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return np.asarray(self._tensors[name])

    def __iter__(self) -> tp.Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclasses.dataclass
class Checkpoint:
    """A model's MoE layers, and everything else that its checkpoint holds.

    Attributes:
      config: the configuration of most of its MoE layers.
      layers: the MoE layers by index. An encoder-decoder's decoder layers count on from its
        encoder's.
      rest: every other tensor by its stored name, untouched.
      hf_config: the parsed config.json, or {} for a model that has none yet.
      beyond: layers past the configuration's last (multi-token prediction); in ``rest``.
      origin: where each layer lay in the files, so that `save` puts it back; {} for new models.
      dtypes: the stored dtype of each tensor, likewise; {} where ``dtype`` asked for another.
      quantized: the quantized tensors of layers that were kept; what lies in them goes back into
        their format. {} where all was read as floats.
    """

    config: MoEConfig
    layers: dict[int, MoE]
    rest: tp.Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    hf_config: dict[str, tp.Any] = dataclasses.field(default_factory=dict)
    beyond: tuple[int, ...] = ()
    origin: dict[int, Layer] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, np.dtype] = dataclasses.field(default_factory=dict)
    quantized: dict[str, QuantizedTensor] = dataclasses.field(default_factory=dict)


def load_layer(
    path: Path,
    layer: int,
    *,
    dtype: tp.Any = None,
    mesh: sharding.AnyMesh | None = None,
    rules: sharding.Rules | None = None,
    quantized: Quantized = "dequantize",
    transposed: bool | None = None,
    form: str | None = None,
) -> MoE:
    """Loads one MoE layer of a public checkpoint.

    Args:
      path: a directory with config.json and safetensors files, sharded or not.
      layer: the layer's index in the model.
      dtype: dtype of the experts' weights; None keeps the stored one. The router's parameters
        are float32 always.
      mesh, rules: see `moe_flax.MoE`; each process reads only what its devices hold.
      quantized: "dequantize": quantized weights are read as floats, float32 unless ``dtype``
        says otherwise. "keep": the experts' stay as they are stored, in variables that are no
        Params, with their scales; other parameters are read as floats.
      transposed: for "keep", whether the layer holds wi as [E, J, F, D] and wo as [E, D, F], as
        kernels for GPUs want them and as values of four bits can stay two in a byte. None: on
        GPUs, and where there are such values; otherwise those become float8_e4m3fn.
      form: the on-disk form's name where a family has two under the same keys (Qwen3-VL-MoE).

    Returns:
      A `moe_flax.MoE`.

    Raises:
      CheckpointError: a ValueError that names the file and the tensor.
    """
    _check_quantized(quantized)
    source = open_source(path, form=form, only=layer)
    return _build(source, layer, quantized, transposed, dtype=dtype, mesh=mesh, rules=rules)


def _build(
    source: Source,
    index: int,
    quantized: Quantized,
    transposed: bool | None,
    *,
    dtype: tp.Any,
    mesh: sharding.AnyMesh | None,
    rules: sharding.Rules | None,
) -> MoE:
    bound = source.layer(index)
    parameters: dict[str, Parameter] = dict(source.parameters(index))
    turn = False
    if quantized == "keep":
        axes = mesh_axes(mesh, rules)
        if transposed is None:
            platform = sharding.mesh_platform(axes.mesh) if axes is not None else None
            transposed = True if (platform or default_platform()) == "gpu" else None
        kept, turn = kept_parameters(
            bound.bindings,
            source.tensors,
            transposed=transposed,
            shards=axes.size(axes.mlp) if axes is not None else 1,
        )
        turn = turn and bool(kept)
        for name in ("experts.wi", "experts.wo") if turn else ():
            parameters[name] = turned(parameters[name])
        for name, weight in kept.items():
            parameters |= weight.parameters(name)
    return build_moe(bound.config, parameters, dtype=dtype, mesh=mesh, rules=rules, transposed=turn)


def load(
    path: Path,
    *,
    dtype: tp.Any = None,
    mesh: sharding.AnyMesh | None = None,
    rules: sharding.Rules | None = None,
    quantized: Quantized = "dequantize",
    transposed: bool | None = None,
    form: str | None = None,
) -> Checkpoint:
    """Loads all MoE layers of a public checkpoint; nothing in it is lost.

    Args and errors are those of `load_layer`; a language model that has lost its head is an error
    as well.

    Returns:
      A `Checkpoint`: ``.config``, ``.layers``, ``.rest``.
    """
    _check_quantized(quantized)
    source = open_source(path, form=form)
    source.check_head()
    layers = {
        index: _build(source, index, quantized, transposed, dtype=dtype, mesh=mesh, rules=rules)
        for index in source.layers
    }
    taken = [key for bound in source.layers.values() for key in bound.keys]
    rest, hf_config = Rest(source.tensors, source.rest), source.hf_config
    found: dict[str, QuantizedTensor] = {}
    if quantized == "keep":
        logical = source.quantized
        found = {key: logical[key] for key in taken if key in logical}
        names = [logical[n].keys if n in logical else (n,) for n in source.rest]
        rest = Rest(source.stored, [name for group in names for name in group])
    else:
        hf_config = without_quantization(hf_config)
    return Checkpoint(
        config=source.config,
        layers=layers,
        rest=rest,
        hf_config=hf_config,
        beyond=tuple(source.beyond),
        origin=source.layers,
        dtypes={} if dtype else {key: np.dtype(source.tensors[key].dtype) for key in taken},
        quantized=found,
    )


def load_parameters(
    path: Path,
    layer: int,
    *,
    quantized: Quantized = "dequantize",
    transposed: bool = False,
    form: str | None = None,
) -> dict[str, np.ndarray]:
    """Loads one MoE layer's parameters as NumPy arrays, by their names in the layer.

    Args:
      path, layer, form: see `load_layer`.
      quantized: "dequantize", or "keep": quantized parameters come as stored, with their scales
        as ``experts.wi_scale`` and ``experts.wo_scale``, which `moe_flax.expert_ffn` takes.
      transposed: see `load_layer`; for `moe_flax.expert_ffn` with ``transpose_weights``.

    Raises:
      CheckpointError: a ValueError that names the file and the tensor.
    """
    _check_quantized(quantized)
    source = open_source(path, form=form, only=layer)
    bound = source.layer(layer)
    kept: dict[str, np.ndarray] = {}
    if quantized == "keep":
        kept = keep_parameters(bound.bindings, source.tensors, transposed=transposed)
    parameters: dict[str, Parameter] = dict(source.parameters(layer))
    for name in ("experts.wi", "experts.wo") if transposed else ():
        parameters[name] = turned(parameters[name])
    return kept | {
        name: read(p, dtype=parameter_dtype(name, p.dtype, None))
        for name, p in parameters.items()
        if name not in kept
    }


def _check_quantized(quantized: str) -> None:
    if quantized not in ("dequantize", "keep"):
        raise ValueError(f"quantized must be 'dequantize' or 'keep', got {quantized!r}")


def without_quantization(config: tp.Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    """A config.json for the float tensors that a quantized checkpoint was read as."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "quantization_config"
    }


def save(
    path: Path,
    checkpoint: Checkpoint,
    family: str | None = None,
    *,
    form: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a checkpoint in a public family's files: safetensors, an index, config.json.

    What was loaded goes back under its own keys, in its own form and dtypes; the directory
    appears under its name when it is complete.

    Args:
      path: the directory; absent or empty.
      checkpoint: what `load` gave, or a `Checkpoint` made around new layers.
      family: a model type to write; by default the one it was loaded from, or its config names.
      form: the family's on-disk form; by default the layer's own, or the family's first.
      shard_bytes: bytes of tensors that a file holds at most.

    Raises:
      CheckpointError: a ValueError; the family cannot express the layers' configuration, or the
        target is not empty.
    """
    row = families.find(family or checkpoint.config.family)
    bound = target_layers(checkpoint, row, form)
    outputs = []
    for index, layer in bound.items():
        module = checkpoint.layers[index]
        outputs += module_outputs(layer, module, checkpoint.dtypes, checkpoint.quantized)
    names = {output.name for output in outputs}
    for name in checkpoint.rest:
        if name in names:
            raise fault("is in .rest and a layer's parameter", file=path, tensor=name)
        outputs.append(array_output(name, np.asarray(checkpoint.rest[name])))
    config = target_config(checkpoint, row)
    write_checkpoint(
        path,
        outputs,
        {"config.json": json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"},
        shard_bytes=shard_bytes,
    )


def target_layers(checkpoint: Checkpoint, row: Family, form: str | None) -> dict[int, Layer]:
    """Where each layer goes: back to where it was, or to the family's own keys."""
    bound = {}
    for index, module in checkpoint.layers.items():
        origin = checkpoint.origin.get(index)
        if origin is not None and origin.config.family != row.name:
            origin = None
        count = checkpoint.config.num_layers
        held = origin is not None and any(key in checkpoint.quantized for key in origin.keys)
        if (
            origin is not None
            and form in (None, origin.form.name)
            and (held or not origin.form.floats)
        ):
            bound[index] = origin
            continue
        back = origin.form if origin is not None and origin.form.floats else None
        wanted = float_form(row, form, back)
        bound[index] = bind(row, wanted, module.config, index, count, origin)
    return bound


def find_form(row: Family, name: str | None) -> Form:
    """A family's form by name; its first by default."""
    for form in row.forms:
        if name in (None, form.name):
            return form
    names = ", ".join(form.name for form in row.forms)
    raise fault(f"family {row.name} has no form {name!r}; it has {names}")


def float_form(row: Family, name: str | None, own: Form | None = None) -> Form:
    """The form that holds float weights: the one of this name, else the layer's own.

    Raises:
      CheckpointError: the form of this name holds quantized weights alone.
    """
    form = own if name is None and own is not None else find_form(row, name)
    if form.floats and name is not None:
        raise fault(
            f"form {name} of family {row.name} holds quantized weights, and these are floats;"
            f" write form {form.floats}, or keep them quantized (load and save)"
        )
    return find_form(row, form.floats) if form.floats else form


def target_config(checkpoint: Checkpoint, row: Family) -> dict[str, tp.Any]:
    """The config.json to write: the one that was read, or one made for the family."""
    known = checkpoint.hf_config
    if known and families.resolve(known)[0] is row:
        return known
    return rewrite_config(row, checkpoint.config, known)

"""MoE layers as Orbax checkpoints: one a layer, the rest of the model beside them.

PATH/moe_flax.json        configuration, config.json, and each layer's index
PATH/layers/00003/        Orbax: {"experts.wi": [E, 2, D, F], ...}
PATH/rest/                safetensors: every other tensor
"""

import json
import os
import pathlib
import typing as tp

from moe_flax.checkpoint import families
from moe_flax.checkpoint.building import Building, check_apart, stating
from moe_flax.checkpoint.convert import find_form, float_form, without_quantization
from moe_flax.checkpoint.errors import fault, reading_json
from moe_flax.checkpoint.hf_config import load_json, read_config, rewrite_config
from moe_flax.checkpoint.mapping import parameter_shapes
from moe_flax.checkpoint.modules import parameter_dtype
from moe_flax.checkpoint.outputs import Cast, layer_outputs
from moe_flax.checkpoint.reader import Reader
from moe_flax.checkpoint.schema import Values
from moe_flax.checkpoint.source import Layer, Source, bind
from moe_flax.checkpoint.streamed import Streamed, restored_tree, save_tree
from moe_flax.checkpoint.transform import conversion_cast
from moe_flax.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    Output,
    array_output,
    write_checkpoint,
)
from moe_flax.config import MoEConfig

META_NAME: tp.Final = "moe_flax.json"
_Progress: tp.TypeAlias = tp.Callable[[int], tp.Any]


def write_orbax(
    path: str | os.PathLike[str],
    source: Source,
    *,
    dtype: tp.Any = None,
    fingerprint: str,
    progress: _Progress = lambda n: None,
) -> None:
    """Converts a checkpoint to Orbax, a layer at a time; a run that was cut off is continued.

    Args:
      path: the directory; absent or empty. It appears when it is complete.
      source: the opened checkpoint.
      dtype: see `transform.plan`.
      fingerprint: a run with another one is not continued.
      progress: called with the number of bytes written.
    """
    path = pathlib.Path(path).absolute()
    check_apart(pathlib.Path(source.file), path)
    cast = conversion_cast(source, dtype)
    building = Building(path, fingerprint)
    if not building.begin():
        building.finish()
        return
    work = building.directory
    try:
        with stating(work):
            _write_parts(work, source, cast, progress)
        building.finish()
    except Exception:
        building.abandon()
        raise


def _write_parts(work: pathlib.Path, source: Source, cast: Cast, progress: _Progress) -> None:
    """Everything that is not there yet."""
    for index, bound in source.layers.items():
        target = work / "layers" / f"{index:05d}"
        tree = {
            name: Streamed(
                parameter,
                cast.parameter(source, name, bound.bindings[name])
                or parameter_dtype(name, parameter.dtype, None),
                by_row=name.startswith("experts."),
                progress=progress,
            )
            for name, parameter in source.parameters(index).items()
        }
        if target.exists():  # Orbax renames a directory when it is complete
            progress(sum(leaf.nbytes for leaf in tree.values()))
        else:
            save_tree(target, tree)
    if not (work / "rest").exists():
        rest = [cast.rest(source, name) for name in source.rest]
        write_checkpoint(work / "rest", rest, {}, progress=progress)
    meta = {
        "hf_config": cast.config(without_quantization(source.hf_config)),
        "layers": {
            str(i): {
                "config": bound.config.to_dict(),
                "form": bound.form.name,
                "prefix": bound.prefix,
            }
            for i, bound in source.layers.items()
        },
    }
    (work / META_NAME).write_text(json.dumps(meta, indent=1))


def from_orbax(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    form: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: _Progress = lambda n: None,
) -> None:
    """Writes what `write_orbax` wrote as a family's own files.

    Args:
      source: the Orbax directory.
      path: the directory to write; absent or empty.
      family, form: what to write; by default what it came from.
      shard_bytes, progress: see `write_checkpoint`.

    Raises:
      CheckpointError: source is no such directory, or the family cannot hold its layers.
    """
    root = pathlib.Path(source).absolute()
    path = pathlib.Path(path).absolute()
    check_apart(root, path)
    meta = load_json(root / META_NAME)
    with reading_json(root / META_NAME):
        layers, hf_config = _targets(meta, family, form)
    outputs: list[Output] = []
    for bound in layers:
        directory = root / "layers" / f"{bound.index:05d}"
        parameters = restored_tree(directory)
        found = {name: restored.shape for name, restored in parameters.items()}
        wanted = parameter_shapes(bound.config)
        if found != wanted:
            differing = sorted({name for name, _ in found.items() ^ wanted.items()})
            raise fault(f"{differing} are not what {META_NAME} says", file=directory)
        outputs += layer_outputs(bound, parameters, {})
    rest = Reader(root / "rest")
    outputs += [array_output(name, rest[name]) for name in rest]
    text = json.dumps(hf_config, indent=2, sort_keys=True).encode() + b"\n"
    write_checkpoint(
        path,
        outputs,
        {"config.json": text},
        shard_bytes=shard_bytes,
        progress=progress,
        fingerprint=f"{root}:{(root / META_NAME).stat().st_mtime_ns}:{family}:{form}",
    )


def _targets(
    meta: Values, family: str | None, form: str | None
) -> tuple[list[Layer], dict[str, tp.Any]]:
    """Where each layer goes, and the config.json to write."""
    row, values = families.resolve(meta["hf_config"])
    config = read_config(row, values)
    target = families.find(family) if family else row
    layers = []
    for number, layer in meta["layers"].items():
        moe, index = MoEConfig.from_dict(layer["config"]), int(number)
        was = find_form(row, layer["form"])
        origin = Layer(index, moe, str(layer["prefix"]), was, {}) if target is row else None
        wanted = float_form(target, form, was if target is row else None)
        layers.append(bind(target, wanted, moe, index, config.num_layers, origin))
    hf_config = dict(meta["hf_config"])
    if target is not row:
        hf_config = rewrite_config(target, config, hf_config)
    return layers, hf_config

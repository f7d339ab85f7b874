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
from moe_flax.checkpoint.convert import float_form, without_quantization
from moe_flax.checkpoint.errors import fault, reading_config
from moe_flax.checkpoint.hf_config import load_json, read_config, rewrite_config, with_dtype
from moe_flax.checkpoint.mapping import parameter_shapes
from moe_flax.checkpoint.modules import parameter_dtype
from moe_flax.checkpoint.outputs import layer_outputs
from moe_flax.checkpoint.reader import Reader
from moe_flax.checkpoint.source import Source, bind
from moe_flax.checkpoint.streamed import Streamed, restored_tree, save_tree
from moe_flax.checkpoint.transform import conversion_cast
from moe_flax.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    Output,
    array_output,
    check_target,
    check_unfinished,
    discard,
    incomplete,
    write_checkpoint,
)
from moe_flax.config import MoEConfig

META_NAME: tp.Final = "moe_flax.json"
_MARK: tp.Final = "fingerprint"
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
    check_target(path)
    cast = conversion_cast(source, dtype)
    work = incomplete(path)
    mark = work / _MARK
    check_unfinished(work, _MARK, {"layers", "rest", "rest.incomplete", META_NAME})
    try:
        if not mark.is_file() or mark.read_text() != fingerprint:
            discard(work, _MARK)
            work.mkdir(parents=True)
            mark.write_text(fingerprint)
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
            "hf_config": with_dtype(without_quantization(source.hf_config), dtype),
            "layers": {
                str(i): {
                    "config": bound.config.to_dict(),
                    "form": bound.form.floats or bound.form.name,
                    "prefix": bound.prefix,
                }
                for i, bound in source.layers.items()
            },
        }
        (work / META_NAME).write_text(json.dumps(meta, indent=1))
        mark.unlink()
        if path.exists():
            path.rmdir()
        os.rename(work, path)
    except Exception as error:
        discard(work, _MARK)
        if isinstance(error, OSError):
            raise fault(f"cannot be written ({error.strerror})", file=path) from error
        raise


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
    meta = load_json(root / META_NAME)
    with reading_config(root / META_NAME):
        hf_config, layers = meta["hf_config"], dict(meta["layers"])
        row, values = families.resolve(hf_config)
        config = read_config(row, values)
    target = families.find(family) if family else row
    outputs: list[Output] = []
    for number, layer in layers.items():
        with reading_config(root / META_NAME):
            moe, index = MoEConfig.from_dict(layer["config"]), int(number)
            stored = layer["form"] if target is row else None
            prefix = layer["prefix"] if target is row and form in (None, stored) else None
        wanted = float_form(target, form or stored, None)
        bound = bind(target, wanted, moe, index, config.num_layers, prefix=prefix)
        directory = root / "layers" / f"{index:05d}"
        parameters = restored_tree(directory)
        if set(parameters) != set(parameter_shapes(moe)):
            raise fault(f"lacks parameters of layer {number}, or has others", file=directory)
        outputs += layer_outputs(bound, parameters, {})
    rest = Reader(root / "rest")
    outputs += [array_output(name, rest[name]) for name in rest]
    if target is not row:
        hf_config = rewrite_config(target, config, hf_config)
    text = json.dumps(hf_config, indent=2, sort_keys=True).encode() + b"\n"
    write_checkpoint(
        path,
        outputs,
        {"config.json": text},
        shard_bytes=shard_bytes,
        progress=progress,
        fingerprint=f"{root}:{(root / META_NAME).stat().st_mtime_ns}:{target.name}:{form}",
    )

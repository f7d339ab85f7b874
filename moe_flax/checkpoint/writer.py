"""Safetensors files, written whole or not at all, and continued where a run was cut off.

Everything is planned before a byte is written: which tensor goes to which shard is a function of
names, dtypes and shapes alone. Shards are written under another name and renamed when complete,
in a directory that is itself renamed when all is there.
"""

import dataclasses
import json
import math
import os
import pathlib
import typing as tp

import numpy as np

from moe_flax.checkpoint.building import (
    NOTE_SUFFIX,
    Building,
    replace_bytes,
    stating,
    writable,
)
from moe_flax.checkpoint.errors import CheckpointError, fault
from moe_flax.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME, read_header

_NAMES: tp.Final = {dtype: name for name, dtype in DTYPES.items()}
DEFAULT_SHARD_BYTES: tp.Final = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor to write.

    Args:
      name, dtype, shape: what the header says of it.
      chunks: gives its data in order, as contiguous arrays of ``dtype``; called when needed.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: tp.Callable[[], tp.Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


def array_output(name: str, array: np.ndarray) -> Output:
    """An Output of an array at hand."""
    return Output(name, array.dtype, array.shape, lambda: [np.ascontiguousarray(array)])


class Notes(tp.Protocol):
    """Something measured while shards are written, kept beside each until all are there."""

    def take(self) -> str:
        """What was measured since the last call, in a line."""
        ...

    def recall(self, note: str) -> None:
        """Adds what a run before has measured."""
        ...


def plan_shards(outputs: tp.Sequence[Output], shard_bytes: int) -> dict[str, list[Output]]:
    """Splits tensors, in their order, into files of at most ``shard_bytes`` where they fit."""
    groups: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, 1)
    }


def _header(outputs: tp.Sequence[Output]) -> bytes:
    header: dict[str, tp.Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for output in outputs:
        if output.dtype not in _NAMES:
            raise fault(f"dtype {output.dtype} has no safetensors name", tensor=output.name)
        header[output.name] = {
            "dtype": _NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [position, position + output.nbytes],
        }
        position += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    file: pathlib.Path,
    outputs: tp.Sequence[Output],
    progress: tp.Callable[[int], tp.Any] = lambda n: None,
    *,
    before_rename: tp.Callable[[], tp.Any] = lambda: None,
) -> None:
    """Writes one safetensors file under a temporary name and renames it when it is on the disk."""
    partial = file.with_name(file.name + ".partial")
    with writable(partial) as handle:
        handle.write(_header(outputs))
        for output in outputs:
            written = 0
            for chunk in output.chunks():
                if chunk.dtype != output.dtype:
                    raise fault(f"got {chunk.dtype}, planned {output.dtype}", tensor=output.name)
                handle.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
                written += chunk.nbytes
                progress(chunk.nbytes)
            if written != output.nbytes:
                raise fault(
                    f"wrote {written} of {output.nbytes} bytes", file=file, tensor=output.name
                )
        handle.flush()
        os.fsync(handle.fileno())
    before_rename()
    os.replace(partial, file)


def write_checkpoint(
    path: str | os.PathLike[str],
    outputs: tp.Sequence[Output],
    files: tp.Mapping[str, bytes],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: tp.Callable[[int], tp.Any] = lambda n: None,
    fingerprint: str = "",
    notes: Notes | None = None,
) -> None:
    """Writes a checkpoint directory; it appears under its name when it is complete.

    Args:
      path: the directory; absent or empty.
      outputs: the tensors, each name once.
      files: further small files by name, such as config.json.
      shard_bytes: bytes of data a file holds at most, unless one tensor alone has more.
      progress: called with the number of bytes written.
      fingerprint: what the data depends on beside names and shapes. A run that was cut off is
        continued where its fingerprint and plan are the same, and thrown away otherwise; without
        one nothing is continued.
      notes: what is measured while the data is written; a run that continues recalls it.

    Raises:
      CheckpointError: the target is not empty, PATH.incomplete is no unfinished checkpoint, two
        tensors have one name, or the disk is full or cannot be written. After any error nothing
        is left behind.
    """
    path = pathlib.Path(path)
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise fault("would be written twice", file=path, tensor=twice[0])
    shards = plan_shards(outputs, shard_bytes)
    plan = fingerprint + "".join(shard + _header(group).hex() for shard, group in shards.items())
    building = Building(path, plan, continued=bool(fingerprint))
    if not building.begin():
        progress(sum(output.nbytes for output in outputs))
        building.finish()
        return
    work = building.directory
    try:
        with stating(work):
            for shard, group in shards.items():
                _write_shard(work / shard, group, progress, notes)
            if len(shards) > 1:
                index = {
                    "metadata": {"total_size": sum(output.nbytes for output in outputs)},
                    "weight_map": {o.name: shard for shard, group in shards.items() for o in group},
                }
                replace_bytes(work / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
            for name, content in files.items():
                replace_bytes(work / name, content)
        building.finish()
    except BaseException as error:
        if isinstance(error, Exception) or not fingerprint:  # an interrupt is continued later
            building.abandon()
        raise


def _write_shard(
    file: pathlib.Path,
    outputs: tp.Sequence[Output],
    progress: tp.Callable[[int], tp.Any],
    notes: Notes | None,
) -> None:
    """Writes a shard, or takes one that is there; its note is on the disk before it is."""
    note = file.with_name(file.name + NOTE_SUFFIX)
    if _is_done(file, outputs) and (notes is None or note.is_file()):
        if notes is not None:
            notes.recall(note.read_text())
        progress(sum(output.nbytes for output in outputs))
        return

    def measured() -> None:
        if notes is not None:
            replace_bytes(note, notes.take().encode())

    write_file(file, outputs, progress, before_rename=measured)


def _is_done(file: pathlib.Path, outputs: tp.Sequence[Output]) -> bool:
    """Whether a complete shard of this plan lies there; shards are renamed only when complete."""
    try:
        infos = {} if file.is_symlink() else read_header(file)
    except CheckpointError:
        return False
    planned = {output.name: (output.dtype, tuple(output.shape)) for output in outputs}
    return {name: (info.dtype, info.shape) for name, info in infos.items()} == planned

"""Safetensors files, written whole or not at all, and continued where a run was cut off.

Everything is planned before a byte is written: which tensor goes to which shard is a function of
names, dtypes and shapes alone. Shards are written under another name and renamed when complete,
in a directory that is itself renamed when all is there.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import typing as tp

import numpy as np

from moe_flax.checkpoint.errors import CheckpointError, fault
from moe_flax.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME, read_header

_NAMES: tp.Final = {dtype: name for name, dtype in DTYPES.items()}
_PLAN_NAME: tp.Final = "plan.sha256"
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
) -> None:
    """Writes one safetensors file under a temporary name and renames it when it is on the disk."""
    partial = file.with_name(file.name + ".partial")
    with _writable(partial) as handle:
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
    os.replace(partial, file)


@contextlib.contextmanager
def _writable(file: pathlib.Path) -> tp.Iterator[tp.BinaryIO]:
    try:
        with open(file, "wb") as handle:
            yield handle
    except OSError as error:
        raise fault(f"cannot be written ({error.strerror})", file=file) from error


def incomplete(path: pathlib.Path) -> pathlib.Path:
    """The directory that an unfinished checkpoint lies in, beside its final place."""
    return path.with_name(path.name + ".incomplete")


def check_unfinished(work: pathlib.Path, mark: str, known: tp.Collection[str]) -> None:
    """Raises a CheckpointError where what lies in an unfinished checkpoint's place is not one.

    Args:
      work: the place, see `incomplete`; what is there may be thrown away afterwards.
      mark: a file that a run makes first and removes last.
      known: other names that a run makes.
    """
    problem = "is in the way of an unfinished checkpoint and is none; move it elsewhere"
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        raise fault(problem, file=work)
    if not work.exists() or (work / mark).is_file():
        return
    names = {path.name.removesuffix(".partial") for path in work.iterdir()}
    if names - {mark, *known}:
        raise fault(problem, file=work)


def discard(work: pathlib.Path, mark: str) -> None:
    """Removes an unfinished checkpoint, what marks it as one last."""
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != mark:
            path.unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def check_target(path: pathlib.Path) -> None:
    """Raises a CheckpointError where something is at the target already."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise fault("exists and is no directory; remove it or choose another path", file=path)
    if path.exists() and any(path.iterdir()):
        raise fault("is not empty; remove it or choose another path", file=path)


def write_checkpoint(
    path: str | os.PathLike[str],
    outputs: tp.Sequence[Output],
    files: tp.Mapping[str, bytes],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: tp.Callable[[int], tp.Any] = lambda n: None,
    fingerprint: str = "",
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

    Raises:
      CheckpointError: the target is not empty, two tensors have one name, or the disk is full or
        cannot be written. After any error nothing is left behind.
    """
    path = pathlib.Path(path)
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise fault("would be written twice", file=path, tensor=twice[0])
    check_target(path)
    shards = plan_shards(outputs, shard_bytes)
    work = incomplete(path)
    check_unfinished(work, _PLAN_NAME, {*shards, *files, INDEX_NAME})
    digest = hashlib.sha256(fingerprint.encode())
    for shard, group in shards.items():
        digest.update(shard.encode() + _header(group))
    if (
        not fingerprint
        or not (work / _PLAN_NAME).is_file()
        or (work / _PLAN_NAME).read_text() != digest.hexdigest()
    ):
        discard(work, _PLAN_NAME)
    try:
        work.mkdir(parents=True, exist_ok=True)
        _replace_bytes(work / _PLAN_NAME, digest.hexdigest().encode())
        for shard, group in shards.items():
            if _is_done(work / shard, group):
                progress(sum(output.nbytes for output in group))
            else:
                write_file(work / shard, group, progress)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(output.nbytes for output in outputs)},
                "weight_map": {o.name: shard for shard, group in shards.items() for o in group},
            }
            _replace_bytes(work / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
        for name, content in files.items():
            _replace_bytes(work / name, content)
        (work / _PLAN_NAME).unlink()
        if path.exists():
            path.rmdir()
        os.rename(work, path)
        _sync_directory(path.parent)
    except BaseException as error:
        if isinstance(error, Exception) or not fingerprint:  # an interrupt is continued later
            discard(work, _PLAN_NAME)
        if isinstance(error, OSError):
            raise fault(f"cannot be written ({error.strerror})", file=path) from error
        raise


def _is_done(file: pathlib.Path, outputs: tp.Sequence[Output]) -> bool:
    """Whether a complete shard of this plan lies there; shards are renamed only when complete."""
    try:
        infos = read_header(file)
    except CheckpointError:
        return False
    planned = {output.name: (output.dtype, tuple(output.shape)) for output in outputs}
    return {name: (info.dtype, info.shape) for name, info in infos.items()} == planned


def _replace_bytes(file: pathlib.Path, content: bytes) -> None:
    partial = file.with_name(file.name + ".partial")
    with _writable(partial) as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, file)


def _sync_directory(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Safetensors files, read by their headers: validated, memory-mapped, nothing copied.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, then the data, which the tensors cover without gap or overlap
(https://github.com/huggingface/safetensors).
"""

import collections.abc
import json
import math
import os
import pathlib
import typing as tp
import zipfile

import ml_dtypes
import numpy as np

from moe_flax.checkpoint.errors import fault

DTYPES: tp.Final[dict[str, np.dtype]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": np.uint16,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "U32": np.uint32,
        "I32": np.int32,
        "F32": np.float32,
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
        "C64": np.complex64,
    }.items()
}
MAX_HEADER_BYTES = 100_000_000  # the bound of the reference implementation
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"


class TensorInfo(tp.NamedTuple):
    """One tensor's entry in a header; ``start`` and ``stop`` are byte positions in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def _no_duplicates(file: pathlib.Path) -> tp.Callable[[list[tuple[str, tp.Any]]], dict]:
    def hook(pairs: list[tuple[str, tp.Any]]) -> dict:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise fault(f"JSON names {twice} twice", file=file)
        return values

    return hook


def parse_json(text: bytes, file: pathlib.Path) -> dict[str, tp.Any]:
    """Parses a JSON object; duplicate names and anything else are errors that name the file."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates(file))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise fault(f"not valid JSON ({error})", file=file) from None
    except ValueError as error:  # integers past Python's digit limit, and our own faults
        raise (
            error if isinstance(error, type(fault(""))) else fault(str(error), file=file)
        ) from None
    if not isinstance(value, dict):
        raise fault(f"expected a JSON object, got {type(value).__name__}", file=file)
    return value


def _is_count(value: tp.Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(name: str, entry: tp.Any, data_start: int, file: pathlib.Path) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fault("its entry needs exactly dtype, shape and data_offsets", file=file, tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fault(f"unknown dtype {dtype!r}; known: {sorted(DTYPES)}", file=file, tensor=name)
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise fault(f"shape {shape!r} is no list of sizes", file=file, tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise fault(f"data_offsets {offsets!r} is no pair of positions", file=file, tensor=name)
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise fault(
            f"data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes,"
            f" shape {shape} of {dtype} needs {needed}",
            file=file,
            tensor=name,
        )
    return TensorInfo(DTYPES[dtype], tuple(shape), data_start + offsets[0], data_start + offsets[1])


def read_header(file: pathlib.Path) -> dict[str, TensorInfo]:
    """Reads and checks one safetensors header.

    Raises:
      CheckpointError: the file is missing, truncated, longer than its tensors, or its header is
        malformed; the message names the file and, where there is one, the tensor.
    """
    try:
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size < 8:
                raise fault(f"truncated: {size} bytes, a header alone needs 8", file=file)
            length = int.from_bytes(handle.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise fault(f"header of {length} bytes is over {MAX_HEADER_BYTES}", file=file)
            if 8 + length > size:
                raise fault(f"truncated: header of {length} bytes in a file of {size}", file=file)
            header = parse_json(handle.read(length), file)
    except OSError as error:
        raise fault(f"cannot be read ({error.strerror})", file=file) from None
    header.pop("__metadata__", None)
    infos = {name: _parse_entry(name, entry, 8 + length, file) for name, entry in header.items()}
    position, previous = 8 + length, ""
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != position:
            problem = "overlaps" if info.start < position else "leaves a gap after"
            raise fault(f"its data {problem} {previous or 'the header'!r}", file=file, tensor=name)
        position, previous = info.stop, name
    if position > size:
        raise fault(
            f"truncated: data ends at byte {position}, the file at {size}",
            file=file,
            tensor=previous,
        )
    if position < size:
        raise fault(f"{size - position} bytes past the last tensor", file=file)
    return infos


def leads_outside(path: pathlib.Path, directory: pathlib.Path) -> bool:
    """Whether a path, links followed, leaves a checkpoint's directory.

    The hub's cache links the files of models--X/snapshots/Y to models--X/blobs: those may.
    """
    roots = [directory.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    target = path.resolve()
    return not any(target.is_relative_to(root) for root in roots)


def _shard_path(directory: pathlib.Path, name: tp.Any, index: pathlib.Path) -> pathlib.Path:
    """Resolves a shard's name from an index; it may not lead out of the directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise fault(f"shard name {name!r} is no file name", file=index)
    path = directory / name
    inside = not pathlib.PurePath(name).is_absolute() and ".." not in pathlib.PurePath(name).parts
    try:
        outside = leads_outside(path, directory)
    except (OSError, RuntimeError, ValueError) as error:  # such as half a character
        raise fault(f"shard {name!r} cannot be resolved ({error})", file=index) from None
    if not inside or outside:
        raise fault(f"shard {name!r} lies outside the checkpoint's directory", file=index)
    if not path.is_file():
        raise fault(f"shard {name!r} is missing", file=index)
    return path


def read_index(directory: pathlib.Path, index: pathlib.Path) -> dict[str, str]:
    """Reads an index' weight_map {tensor: shard name}, checked for its types only."""
    try:
        content = parse_json(index.read_bytes(), index)
    except OSError as error:
        raise fault(f"cannot be read ({error.strerror})", file=index) from None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault("has no weight_map", file=index)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fault(f"shard name {shard!r} is no file name", file=index, tensor=name)
    return weight_map


class Reader(collections.abc.Mapping[str, np.ndarray]):
    """The tensors of a checkpoint directory, by name; each access gives a read-only view.

    Args:
      path: a directory with ``model.safetensors.index.json`` and its shards, or with one
        safetensors file.

    Raises:
      CheckpointError: see `read_header`; also a missing or misplaced shard, a tensor that two
        shards hold, and a tensor that the index names and its shard lacks.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.directory = pathlib.Path(path)
        if not self.directory.is_dir():
            raise fault("is no directory", file=self.directory)
        self._maps: dict[pathlib.Path, np.ndarray] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._where: dict[str, tuple[pathlib.Path, TensorInfo]] = {}
        index = self.directory / INDEX_NAME
        torch_files = _torch_files(self.directory)
        if torch_files:
            self._load_torch(torch_files)
        elif index.exists():
            weight_map = read_index(self.directory, index)
            paths = {s: _shard_path(self.directory, s, index) for s in set(weight_map.values())}
            for shard in sorted(paths):
                self._add(paths[shard])
            for name, shard in weight_map.items():
                if name not in self._where or self._where[name][0] != paths[shard]:
                    problem = "the index names it, the shard lacks it"
                    raise fault(problem, file=paths[shard], tensor=name)
        else:
            self._add(_single_file(self.directory))

    def _add(self, file: pathlib.Path) -> None:
        for name, info in read_header(file).items():
            if name in self._where:
                raise fault(f"also in {self._where[name][0].name}", file=file, tensor=name)
            self._where[name] = (file, info)

    def _load_torch(self, files: list[pathlib.Path]) -> None:
        index = self.directory / TORCH_INDEX_NAME
        weight_map = read_index(self.directory, index) if index.exists() else None
        for file in files:
            for name, array in load_torch(file).items():
                if name in self._where:
                    raise fault(f"also in {self._where[name][0].name}", file=file, tensor=name)
                self._where[name] = (file, TensorInfo(array.dtype, array.shape, 0, array.nbytes))
                self._arrays[name] = array
        for name, shard in (weight_map or {}).items():
            if name not in self._where or self._where[name][0].name != shard:
                problem = "the index names it, the shard lacks it"
                raise fault(problem, file=self.directory / shard, tensor=name)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._arrays:
            return self._arrays[name]
        file, info = self._where[name]
        if info.start == info.stop:
            return np.empty(info.shape, info.dtype)
        if file not in self._maps:
            self._maps[file] = np.asarray(np.memmap(file, np.uint8, mode="r"))
        data = self._maps[file]
        if info.stop > data.size:
            raise fault("the file has shrunk since its header was read", file=file, tensor=name)
        return data[info.start : info.stop].view(info.dtype).reshape(info.shape)

    def __iter__(self) -> tp.Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def info(self, name: str) -> TensorInfo:
        """The header's entry of a tensor."""
        return self._where[name][1]

    def file(self, name: str) -> pathlib.Path:
        """The file that holds a tensor."""
        return self._where[name][0]


def _torch_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The pytorch_model.bin files of a directory that has no safetensors ones."""
    index = directory / TORCH_INDEX_NAME
    if next(directory.glob("*.safetensors"), None) or (directory / INDEX_NAME).exists():
        return []
    if index.exists():
        names = sorted(set(read_index(directory, index).values()))
        return [_shard_path(directory, name, index) for name in names]
    single = directory / "pytorch_model.bin"
    return [single] if single.exists() else []


def load_torch(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a file of tensors that torch pickled; only its ``weights_only`` loader ever opens one.

    Raises:
      CheckpointError: torch is not installed, or refuses the file.
    """
    try:
        import torch
    except ImportError:
        raise fault("needs torch to be read (pip install torch)", file=file) from None
    try:
        mapped = zipfile.is_zipfile(file)  # files older than torch 1.6 are no archives
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever its unpickler meets
        raise fault(f"torch cannot load it safely ({error})", file=file) from None
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]  # a training checkpoint: the rest is no weight
    found = {}
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise fault(f"is a {type(tensor).__name__}, no tensor", file=file, tensor=str(name))
        kind = str(tensor.dtype).removeprefix("torch.")
        try:
            if kind in _TORCH_BITS:  # NumPy itself has no such dtype
                bits, dtype = _TORCH_BITS[kind]
                plain = tensor.detach().contiguous().view(getattr(torch, bits))
                found[name] = plain.numpy().view(dtype)
            else:
                found[name] = tensor.detach().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, quantized, without data
            problem = f"is a {tensor.layout} tensor of {kind} that NumPy cannot hold ({error})"
            raise fault(problem, file=file, tensor=name) from None
        if found[name].dtype not in DTYPES.values():
            raise fault(f"has dtype {kind}, which is not known", file=file, tensor=name)
    if not found:
        raise fault("holds no tensors by name", file=file)
    return found


_TORCH_BITS: tp.Final = {
    "bfloat16": ("int16", DTYPES["BF16"]),
    "float8_e4m3fn": ("int8", DTYPES["F8_E4M3"]),
    "float8_e5m2": ("int8", DTYPES["F8_E5M2"]),
    "float8_e8m0fnu": ("int8", DTYPES["F8_E8M0"]),
}


def _single_file(directory: pathlib.Path) -> pathlib.Path:
    if (directory / SINGLE_NAME).exists():
        return directory / SINGLE_NAME
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    names = [path.name for path in found]
    raise fault(f"no {INDEX_NAME} and no {SINGLE_NAME}; safetensors here: {names}", file=directory)

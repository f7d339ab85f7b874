"""Quantized tensors of public checkpoints: found by their names, decoded exactly, in float32.

A quantized tensor lies in several stored ones: values of few bits and their scales. `Logical`
shows each as one float tensor under the name that an unquantized checkpoint would have, so that
nothing above this module knows of formats. Axes here are the stored ones; [out, in] mostly.
"""

import collections.abc
import contextlib
import dataclasses
import math
import os
import typing as tp

import ml_dtypes
import numpy as np

from moe_flax.checkpoint.errors import fault, reading_config, reading_json
from moe_flax.checkpoint.schema import Values

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
FP4_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


@dataclasses.dataclass(frozen=True)
class Format:
    """How one kind of quantized tensor is stored.

    Args:
      name: what `inspect` calls it.
      values: suffix of the values' name; without it the name is that of the float tensor.
      scale: suffixes that the scales' name may have in its place.
      coding: "float8", "fp4" (two a byte, low bits first), "int4" (eight a word, low bits
        first, 8 subtracted), "int8", or "fp4_blocks" (16 bytes on an axis of their own).
      window: sizes of the windows over the last two axes that share a scale; 0 is the whole
        axis, -1 lets the scales' own shape say 1 or full.
      second: suffix of a second scale on top: "" for none.
      divide: the first scale is divided by the second, not multiplied.
      ignored: suffixes of further companions that decoding does not need.
      keeps_name: the values' suffix stays part of the name (its layout differs from the float's).
      swap_down: scales of a stacked down projection are stored [E, out, 1] for [E, in, out].
    """

    name: str
    scale: tuple[str, ...]
    coding: str = "float8"
    values: str = ""
    window: tuple[int, int] = (-1, -1)
    second: str = ""
    divide: bool = False
    ignored: tuple[str, ...] = ("_shape", "_zero_point", "_g_idx")
    keeps_name: bool = False
    swap_down: bool = False


def formats_of(config: Values) -> tuple[Format, ...]:
    """The formats that a config.json announces; () where it is not quantized.

    Raises:
      CheckpointError: the method is not one of those that are read here.
    """
    parts = [config, *(v for v in config.values() if isinstance(v, dict))]
    found = [q for part in parts if (q := part.get("quantization_config")) not in (None, {})]
    if not found:
        return ()
    quantization = found[0]
    if not isinstance(quantization, dict):
        raise fault(f"config.json has quantization_config={quantization!r}; expected an object")
    method = quantization.get("quant_method")
    if method is None:
        raise fault(f"config.json has a quantization_config without quant_method: {quantization}")
    if method == "fp8":
        return _fp8(quantization)
    if method == "fbgemm_fp8":
        return (Format("fbgemm_fp8", ("_scale",), swap_down=True),)
    if method == "mxfp4":
        return (
            Format("mxfp4", ("_scales",), "fp4_blocks", "_blocks", (1, 32), keeps_name=True),
            Format("mxfp4", (".scales",), "fp4_blocks", ".blocks", (1, 32), keeps_name=True),
        )
    if method == "compressed-tensors":
        return _compressed(quantization)
    if method == "modelopt" and quantization.get("quant_algo") == "NVFP4":
        group = _whole(quantization.get("group_size", 16), "group_size")
        return (Format("nvfp4", ("_scale",), "fp4", "", (1, group), second="_scale_2"),)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return (Format("fp8", ("_scale",)),)
    raise fault(
        f"config.json has quantization method {method!r}"
        f" ({quantization.get('quant_algo') or quantization.get('format') or 'no format'}), which"
        " is not read here; known: fp8, fbgemm_fp8, mxfp4, compressed-tensors, modelopt (NVFP4,"
        " FP8). For AWQ, GPTQ and bitsandbytes convert to one of these or to float first"
    )


def _object(value: tp.Any, name: str) -> Values:
    """A part of config.json that is an object, absent, or null."""
    if value is not None and not isinstance(value, dict):
        raise fault(f"config.json has {name}: {value!r}; expected an object")
    return value or {}


def _whole(value: tp.Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise fault(f"config.json has {name}={value!r}; expected a positive integer")
    return value


def _fp8(quantization: Values) -> tuple[Format, ...]:
    block = quantization.get("weight_block_size")
    if block is None:
        return (Format("fp8", ("_scale_inv", "_scale")),)
    if not isinstance(block, list) or len(block) != 2:
        raise fault(f"config.json has weight_block_size={block!r}; expected two sizes")
    rows, columns = (_whole(size, "weight_block_size") for size in block)
    blocks = Format("fp8_block", ("_scale_inv", ".scale"), "float8", "", (rows, columns))
    return (blocks, Format("fp4_block", (".scale", "_scale_inv"), "fp4", "", (1, 32)))


def _compressed(quantization: Values) -> tuple[Format, ...]:
    known = {
        "float-quantized": ("fp8_channel", "float8", "", (-1, -1), ""),
        "int-quantized": ("int8_channel", "int8", "", (-1, -1), ""),
        "naive-quantized": ("fp8_channel", "float8", "", (-1, -1), ""),
        "pack-quantized": ("int4_pack", "int4", "_packed", (1, 32), ""),
        "nvfp4-pack-quantized": ("nvfp4_pack", "fp4", "_packed", (1, 16), "_global_scale"),
        "mxfp4-pack-quantized": ("mxfp4_pack", "fp4", "_packed", (1, 32), ""),
        "mxfp8-quantized": ("mxfp8", "float8", "", (1, 32), ""),
    }
    found = []
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise fault(f"config.json has config_groups={groups!r}; expected an object")
    for group in groups.values() or [{}]:
        group = _object(group, "config_groups")
        name = group.get("format") or quantization.get("format")
        if not isinstance(name, str) or name not in known:
            raise fault(
                f"config.json has compressed-tensors format {name!r}; known: {sorted(known)}"
            )
        label, coding, values, window, second = known[name]
        weights = _object(group.get("weights"), "weights")
        bits = weights.get("num_bits")
        if coding != "int4" and bits not in (None, 4 if coding == "fp4" else 8):
            raise fault(f"config.json has num_bits={bits!r} in format {name}")
        if coding == "int4" and (weights.get("num_bits", 4), weights.get("symmetric", True)) != (
            4,
            True,
        ):
            raise fault("config.json has a packed format that is not symmetric int4")
        if weights.get("group_size"):
            window = (1, _whole(weights["group_size"], "group_size"))
        elif weights.get("strategy") == "channel" and coding == "int4":
            window = (1, 0)
        block = weights.get("block_structure")
        if weights.get("strategy") == "block":
            if not isinstance(block, list) or len(block) != 2:
                raise fault(f"config.json has block_structure={block!r}; expected two sizes")
            window = (_whole(block[0], "block_structure"), _whole(block[1], "block_structure"))
        found.append(
            Format(label, ("_scale",), coding, values, window, second, divide=bool(second))
        )
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A float tensor that is stored quantized; slices of its first axis are decoded when taken."""

    name: str
    format: Format
    parts: tp.Mapping[str, np.ndarray]
    keys: tuple[str, ...]
    file: str | os.PathLike[str] = ""

    dtype: tp.ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as a float tensor."""
        shape = tuple(self.parts["values"].shape)
        if self.format.coding == "fp4_blocks":
            return (*shape[:-2], shape[-2] * 32)
        return (*shape[:-1], shape[-1] * {"fp4": 2, "int4": 8}.get(self.format.coding, 1))

    def __getitem__(self, rows: slice) -> np.ndarray:
        if len(self.shape) < 3:
            return self.decode()[rows]
        start, stop, _ = rows.indices(self.shape[0])
        return self.decode(slice(start, stop))

    def __array__(self, dtype: tp.Any = None, copy: bool | None = None) -> np.ndarray:
        return self.decode() if dtype is None else self.decode().astype(dtype)

    def decode(self, rows: slice | None = None) -> np.ndarray:
        """float32 values of some rows of the first axis, or of all."""
        values, scales, windows = self.split(rows)
        with self._naming():
            return values.astype(np.float32) * expand(scales, values.shape, windows, self.name)

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        """Errors name the file; values and scales that do not fit one another are among them."""
        return reading_json(self.file, f"tensor {self.name!r}: cannot be decoded")

    def split(
        self, rows: slice | None = None, *, packed: bool = False
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Values as stored, their float32 scales, and the windows on each axis.

        Args:
          rows: of the first axis; all by default.
          packed: leave floats of four bits two in a byte, as uint8; else they are unpacked.
        """
        with self._naming():
            return self._split(slice(None) if rows is None else rows, packed)

    def _split(self, rows: slice, packed: bool) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        parts = {
            role: part[rows] if part.ndim and part.shape[0] == self.shape[0] and len(self.shape) > 2
            else part
            for role in ("values", "scale", "second") if role in self.parts
            for part in (self.parts[role],)
        }  # fmt: skip
        values = parts["values"]
        shape = (*(len(range(*rows.indices(n))) for n in self.shape[:1]), *self.shape[1:])
        if packed:
            values = values.view(np.uint8).reshape(*shape[:-1], shape[-1] // 2)
        else:
            values = _unpack(values, self.format.coding)
        scales = self._merge(_float_scale(parts["scale"]), parts.get("second"), shape)
        windows = (*(1,) * (values.ndim - 2), *self.format.window)
        return values, scales, windows

    def _merge(
        self, scales: np.ndarray, second: np.ndarray | None, shape: tuple[int, ...]
    ) -> np.ndarray:
        """float32 scales with as many axes as the values, the second ones in them."""
        if self._swapped:
            scales = scales.swapaxes(1, 2)
        if scales.size == 1:
            scales = scales.reshape((1,) * len(shape))
        elif scales.ndim < len(shape):  # one a tensor of a stack, or one a row
            scales = scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim))
        if second is None:
            return scales
        second = _second(second, shape, self.name)
        return scales / second if self.format.divide else scales * second

    @property
    def _swapped(self) -> bool:
        return self.format.swap_down and len(self.shape) == 3 and self.name.endswith("down_proj")

    def encode_scales(self, merged: np.ndarray) -> np.ndarray:
        """The stored scales that `split` reads as these; the inverse of its second result.

        Args:
          merged: float32, with as many axes as the values; experts that share a scale have it
            each.

        Raises:
          CheckpointError: the stored dtype, or a scale that experts share, cannot say them.
        """
        stored, second = self.parts["scale"], self.parts.get("second")
        exact = self._merge(_float_scale(stored), second, self.shape)
        if np.array_equal(np.broadcast_to(exact, merged.shape), merged, equal_nan=True):
            return stored
        scales = merged[:1] if exact.shape[0] == 1 else merged
        if second is not None:
            other = _second(second, self.shape, self.name)
            scales = scales * other if self.format.divide else scales / other
        if scales.size == stored.size:
            scales = scales.reshape(stored.shape)  # axes that `_merge` swaps or adds have size 1
            if stored.dtype in (np.uint8, np.dtype(ml_dtypes.float8_e8m0fnu)):
                exponents = np.clip(np.frexp(scales)[1] + 126, 0, 254).astype(np.uint8)
                scales = np.where(np.isnan(scales), np.uint8(255), exponents).view(stored.dtype)
            else:
                scales = scales.astype(stored.dtype)
            again = self._merge(_float_scale(scales), second, self.shape)
            if np.array_equal(np.broadcast_to(again, merged.shape), merged, equal_nan=True):
                return scales
        raise fault(
            f"its scales have changed, and {stored.dtype} of shape {stored.shape} cannot say them",
            tensor=self.name,
        )


def _second(second: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """A second scale laid out for the first: one in all, one an expert, or one an expert's half."""
    second = second.astype(np.float32)
    if second.size == 1:
        return second.reshape((1,) * len(shape))
    if len(shape) == 3 and second.shape[0] == shape[0]:
        if second.size == shape[0]:
            return second.reshape(-1, 1, 1)
        if second.shape == (shape[0], 2) and shape[1] % 2 == 0:  # gate, up: rows lie in halves
            return np.repeat(second, shape[1] // 2, axis=1)[:, :, None]
    raise fault(f"its second scale has shape {second.shape}, its values {shape}", tensor=name)


def _unpack(values: np.ndarray, coding: str) -> np.ndarray:
    if coding in ("fp4", "fp4_blocks"):
        if coding == "fp4_blocks":
            values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
        packed = values.view(np.uint8)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
        return FP4_VALUES[codes]
    if coding == "int4":
        words = np.ascontiguousarray(values).view(np.uint32)
        nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        return (nibbles.astype(np.int8) - 8).reshape(*words.shape[:-1], -1)
    return values


def pack(values: np.ndarray, coding: str, name: str = "") -> np.ndarray:
    """Values as they are stored: the inverse of what `QuantizedTensor.split` does to them.

    Raises:
      CheckpointError: a value that the coding does not have.
    """
    if coding in ("fp4", "fp4_blocks"):
        codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        if not np.array_equal(FP4_VALUES[codes], values.astype(np.float32)):
            raise fault("holds values that are no floats of four bits", tensor=name)
        return codes[..., ::2] | codes[..., 1::2] << 4
    if coding == "int4":
        if values.min(initial=0) < -8 or values.max(initial=0) > 7:
            raise fault("holds values beyond -8 to 7", tensor=name)
        nibbles = (values + 8).astype(np.uint32).reshape(*values.shape[:-1], -1, 8)
        return np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
    return values


def _float_scale(scale: np.ndarray) -> np.ndarray:
    """Scales as float32; bytes are exponents of two."""
    if scale.dtype in (np.uint8, np.dtype(ml_dtypes.float8_e8m0fnu)):
        exponents = scale.view(np.uint8).astype(np.int32) - 127
        return np.where(exponents == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    return scale.astype(np.float32)


def expand(
    scales: np.ndarray, shape: tuple[int, ...], windows: tuple[int, ...], name: str = ""
) -> np.ndarray:
    """Repeats scales over their windows, the last one cut where it is ragged.

    Raises:
      CheckpointError: an axis has another number of scales than its windows ask for.
    """
    for axis, (size, window) in enumerate(zip(shape, windows, strict=True)):
        count = scales.shape[axis]
        if window < 0 or (axis < len(shape) - 2 and count == 1):
            wanted = (1, size)
        else:
            wanted = (math.ceil(size / window) if window else 1,)
        if count not in wanted:
            raise fault(
                f"its scales have shape {scales.shape}; {shape} with windows {windows} needs"
                f" {' or '.join(map(str, wanted))} on axis {axis}",
                tensor=name,
            )
        if window > 1 and count > 1:
            scales = np.repeat(scales, window, axis=axis)[
                tuple(slice(size if a == axis else None) for a in range(scales.ndim))
            ]
    return scales


class Logical(collections.abc.Mapping[str, tp.Any]):
    """A checkpoint's tensors with each quantized one as a single float tensor.

    Args:
      tensors: the stored tensors.
      config: its config.json.
      file: what errors call it.

    Raises:
      CheckpointError: the method is not known, or a tensor of 8-bit floats has no scale.
    """

    def __init__(
        self,
        tensors: tp.Mapping[str, np.ndarray],
        config: Values,
        file: str | os.PathLike[str] = "",
    ):
        self.stored = tensors
        self._quantized: dict[str, QuantizedTensor] = {}
        taken: set[str] = set()
        with reading_config(file):
            formats = formats_of(config)
        for name in tensors:
            found = next((q for f in formats if (q := _find(tensors, name, f, file))), None)
            if found is not None:
                self._quantized[found.name] = found
                taken.update(found.keys)
        for name in tensors:
            if name not in taken and _dtype(tensors, name) in FLOAT8:
                problem = "has 8-bit floats and no scale that config.json's quantization_config"
                raise fault(f"{problem} explains", file=_file(tensors, name, file), tensor=name)
        clash = sorted(set(self._quantized) & (set(tensors) - taken))
        if clash:
            raise fault("is there both quantized and not", file=file, tensor=clash[0])
        self._plain = [name for name in tensors if name not in taken]

    def __getitem__(self, name: str) -> tp.Any:
        if name in self._quantized:
            return self._quantized[name]
        return self.stored[name]

    def __iter__(self) -> tp.Iterator[str]:
        yield from self._plain
        yield from self._quantized

    def __len__(self) -> int:
        return len(self._plain) + len(self._quantized)

    def __contains__(self, name: object) -> bool:
        return name in self._quantized or name in self.stored

    @property
    def quantized(self) -> tp.Mapping[str, QuantizedTensor]:
        """The quantized ones."""
        return self._quantized


def _dtype(tensors: tp.Mapping[str, np.ndarray], name: str) -> np.dtype:
    info = getattr(tensors, "info", None)
    return info(name).dtype if info else np.dtype(tensors[name].dtype)


def _file(tensors: tp.Any, name: str, file: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file that holds a tensor, where the tensors know theirs."""
    return tensors.file(name) if hasattr(tensors, "file") else file


_CODED: tp.Final = {
    "float8": FLOAT8,
    "int8": (np.dtype(np.int8),),
    "int4": (np.dtype(np.int32), np.dtype(np.uint32)),
    "fp4": (np.dtype(np.uint8), np.dtype(np.int8)),
    "fp4_blocks": (np.dtype(np.uint8),),
}


def _find(
    tensors: tp.Mapping[str, np.ndarray],
    name: str,
    form: Format,
    file: str | os.PathLike[str],
) -> QuantizedTensor | None:
    """The quantized tensor whose values are stored as ``name``, or None."""
    if not name.endswith(form.values) or _dtype(tensors, name) not in _CODED[form.coding]:
        return None
    stem = name[: len(name) - len(form.values)]
    scale = next((key for s in form.scale if (key := _companion(stem, s)) in tensors), None)
    if scale is None or scale == name:
        return None
    keys = {"values": name, "scale": scale}
    if form.second:
        keys["second"] = stem + form.second
        if keys["second"] not in tensors:
            problem = f"lacks its second scale {keys['second']!r}"
            raise fault(problem, file=_file(tensors, name, file), tensor=name)
    extra = [_companion(stem, s) for s in form.ignored]
    extra += [stem.removesuffix("weight") + "input_scale", stem + "_input_scale"]
    extra += [stem.removesuffix("weight") + "input_global_scale"]
    others = [key for key in dict.fromkeys(extra) if key in tensors]
    keys |= {f"other{i}": key for i, key in enumerate(others)}
    return QuantizedTensor(
        name if form.keeps_name else stem,
        form,
        _Lazy(tensors, keys),
        tuple(keys.values()),
        _file(tensors, name, file),
    )


def _companion(stem: str, suffix: str) -> str:
    if suffix == ".scale":  # X.weight and X.scale
        return stem.removesuffix(".weight") + suffix
    return stem + suffix


class _Lazy(collections.abc.Mapping[str, np.ndarray]):
    """Parts by role, mapped when used."""

    def __init__(self, tensors: tp.Mapping[str, np.ndarray], keys: tp.Mapping[str, str]):
        self._tensors, self._keys = tensors, keys

    def __getitem__(self, role: str) -> np.ndarray:
        return self._tensors[self._keys[role]]

    def __iter__(self) -> tp.Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

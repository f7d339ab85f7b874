"""Quantized parameters as they are stored: values and scales in our layout, and back to the files.

Values of four bits that lie along the contraction stay two in a byte where the layer's weights are
transposed, which brings the contraction last; elsewhere they become float8_e4m3fn, which holds
them exactly. int4 becomes int8.
"""

import dataclasses
import functools
import itertools
import math
import typing as tp

import ml_dtypes
import numpy as np

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.layouts import parse, rearrange, shape_of
from moe_flax.checkpoint.mapping import Binding, Index, Parameter, Tensors, read
from moe_flax.checkpoint.quantized import QuantizedTensor
from moe_flax.quantized_weights import fitting_window

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def _turn(axes: str, transposed: bool) -> str:
    """A parameter's layout, its last two axes swapped where it lies transposed."""
    *lead, rows, columns = axes.split()
    return " ".join((*lead, columns, rows) if transposed else (*lead, rows, columns))


@dataclasses.dataclass(frozen=True)
class Kept:
    """How one quantized parameter is kept.

    Args:
      binding: where it lies; its tensors are all quantized in one way.
      tensors: the checkpoint's `Logical` tensors, or the quantized ones by name.
      transposed: whether the layer has the last two axes swapped.
      shards: devices that share F.
    """

    binding: Binding
    tensors: Tensors
    transposed: bool = False
    shards: int = 1

    def tensor(self, expert: int = 0, branch: int = 0) -> QuantizedTensor:
        """The stored tensor of a block."""
        key = self.binding.key(expert, branch)
        tensor = self.tensors[key]
        if not isinstance(tensor, QuantizedTensor):
            raise fault("is not quantized", tensor=key)
        return tensor

    @functools.cached_property
    def packed(self) -> bool:
        """Whether two values stay in a byte."""
        last = parse(self.binding.entry.axes)[-1]
        axes = _turn(self.binding.axes, self.transposed).split()
        return self.tensor().format.coding in ("fp4", "fp4_blocks") and last == (axes[-1],)

    @functools.cached_property
    def axes(self) -> tuple[str, str]:
        """The layouts of one block: stored, and in the layer."""
        stored, ours = self.binding.block_axes
        return stored, _turn(ours, self.transposed)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each layout axis of the values."""
        sizes = dict(self.binding.sizes)
        if self.packed:
            sizes[parse(self.binding.entry.axes)[-1][0]] //= 2
        return sizes

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Of the values in the layer."""
        coding = self.tensor().format.coding
        if coding in ("fp4", "fp4_blocks"):
            return np.dtype(np.uint8) if self.packed else _E4M3
        return np.dtype(np.int8) if coding == "int4" else self.tensor().parts["values"].dtype

    @functools.cached_property
    def exponents(self) -> bool:
        """Whether the scales are powers of two that the layer holds as such."""
        tensor = self.tensor()
        return self.packed and "second" not in tensor.parts and _is_exponent(tensor.parts["scale"])

    @property
    def lead(self) -> int:
        """Axes that are walked block by block."""
        return self.binding.by_expert + self.binding.by_branch

    def _split(self, expert: int, branch: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        tensor = self.tensor(expert, branch)
        by_row = self.binding.rows_by_expert == 1
        if self.binding.rows_by_expert > 1:
            raise fault("holds experts row by row; load it dequantized", tensor=tensor.name)
        rows = slice(expert, expert + 1) if by_row else None
        values, scales, windows = tensor.split(rows, packed=self.packed)
        if by_row:
            values, scales, windows = values[0], scales[0], windows[1:]
        return values, scales, windows

    def values(self, expert: int, branch: int) -> np.ndarray:
        """One block's values in the layer's layout."""
        values, _, _ = self._split(expert, branch)
        if values.dtype == np.float32:
            values = values.astype(_E4M3)
        if values.dtype != self.dtype:
            name = self.tensor(expert, branch).name
            raise fault(f"has {values.dtype}, the first expert {self.dtype}", tensor=name)
        return rearrange(values, *self.axes, self.sizes)

    @functools.cached_property
    def stored_scales(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of the first block's scales: the size of each layout axis, and its windows."""
        _, scales, windows = self._split(0, 0)
        return self._scale_sizes(scales.shape, windows, self.tensor().name)

    def _scale_sizes(
        self, shape: tuple[int, ...], windows: tuple[int, ...], name: str
    ) -> tuple[dict[str, int], dict[str, int]]:
        sizes = dict(self.binding.sizes)
        found: dict[str, int] = {}
        for group, count, window in zip(parse(self.axes[0]), shape, windows, strict=True):
            whole = int(np.prod([self.binding.sizes[atom] for atom in group]))
            if count == whole:
                continue
            if count > 1 and (window < 1 or math.ceil(whole / window) != count):
                raise fault(
                    f"its scales have shape {shape}, {count} over {whole} with windows {windows}",
                    tensor=name,
                )
            if len(group) == 1 or count == 1:
                sizes |= dict.fromkeys(group, 1) | {group[-1]: count}
            elif self.binding.sizes[group[-1]] % window == 0:
                sizes[group[-1]] = self.binding.sizes[group[-1]] // window
            else:
                raise fault(
                    f"blocks of {window} lie across the parts of axis {' '.join(group)}"
                    f" ({[self.binding.sizes[atom] for atom in group]}); load it dequantized",
                    tensor=name,
                )
            if count > 1:
                found[group[-1]] = window
        return sizes, found

    @functools.cached_property
    def repeats(self) -> dict[str, tuple[int, int]]:
        """Axes whose scales are repeated, so that every reader and device finds its own.

        (The window that is stored, the one in the layer.)
        """
        found = {}
        last = _turn(self.binding.axes, self.transposed).split()[-1]
        for axis, window in self.stored_scales[1].items():
            shards = self.shards if axis == "F" else 1
            packed = self.packed and axis == last
            fitting = fitting_window(self.binding.sizes[axis], window, shards, packed=packed)
            if fitting != window:
                found[axis] = (window, fitting)
        return found

    def scales(self, expert: int, branch: int) -> np.ndarray:
        """One block's scales in the layer's layout."""
        _, scales, windows = self._split(expert, branch)
        sizes, _ = self._scale_sizes(scales.shape, windows, self.tensor(expert, branch).name)
        if sizes != self.stored_scales[0]:
            name = self.tensor(expert, branch).name
            raise fault(f"its scales have shape {scales.shape}, the first's another", tensor=name)
        scales = rearrange(scales, self.axes[0], self.axes[1], sizes)
        for axis, (window, fitting) in self.repeats.items():
            size, at = self.binding.sizes[axis], self.axes[1].split().index(axis)
            starts = np.arange(0, size, fitting) // window
            scales = np.take(scales, starts, axis=at)
        return scales.astype(_E8M0) if self.exponents else scales

    def parameters(self, name: str) -> dict[str, Parameter]:
        """The values and the scales, each read when asked."""
        values = shape_of(_turn(self.binding.axes, self.transposed), self.sizes)
        block = self.scales(0, 0)
        scales = (*values[: self.lead], *block.shape)
        return {
            name: _Blocks(self, values, self.dtype, self.values),
            f"{name}_scale": _Blocks(self, scales, block.dtype, self.scales),
        }


def _is_exponent(scale: np.ndarray) -> bool:
    return scale.dtype in (np.uint8, _E8M0)


class _Blocks:
    """A parameter that is read block by block."""

    def __init__(
        self,
        kept: Kept,
        shape: tuple[int, ...],
        dtype: np.dtype,
        block: tp.Callable[[int, int], np.ndarray],
    ):
        self.kept, self.shape, self.dtype, self.block = kept, shape, dtype, block

    def read_into(self, out: np.ndarray, index: Index) -> None:
        lead, binding = self.kept.lead, self.kept.binding
        starts = [s.start for s in index[:lead]]
        for place in itertools.product(*(range(s.start, s.stop) for s in index[:lead])):
            expert = place[0] if binding.by_expert else 0
            branch = place[-1] if binding.by_branch else 0
            at = tuple(p - s for p, s in zip(place, starts, strict=True))
            out[at] = self.block(expert, branch)[index[lead:]]


def is_quantized(binding: Binding, tensors: Tensors) -> bool:
    """Whether all of a parameter's tensors are quantized."""
    return bool(binding.keys) and all(
        isinstance(tensors.get(key), QuantizedTensor) for key in binding.keys
    )


def kept_parameters(
    layer_bindings: tp.Mapping[str, Binding],
    tensors: Tensors,
    *,
    transposed: bool | None = None,
    shards: int = 1,
) -> tuple[dict[str, Kept], bool]:
    """The experts' quantized weights of a layer, and whether they lie transposed.

    Args:
      layer_bindings: where the parameters lie.
      tensors: the checkpoint's `Logical` tensors.
      transposed: None takes what keeps values of four bits two in a byte, where there are any.
      shards: devices that share F.
    """
    names = [n for n in ("experts.wi", "experts.wo") if is_quantized(layer_bindings[n], tensors)]
    if transposed is None:
        transposed = any(Kept(layer_bindings[n], tensors, True).packed for n in names)
    return {n: Kept(layer_bindings[n], tensors, transposed, shards) for n in names}, transposed


def keep_parameters(
    bindings: tp.Mapping[str, Binding], tensors: Tensors, *, transposed: bool = False
) -> dict[str, np.ndarray]:
    """All quantized parameters of a layer as arrays, as ``name`` and ``name_scale``."""
    found: dict[str, np.ndarray] = {}
    for name, binding in bindings.items():
        if is_quantized(binding, tensors):
            turn = transposed and name in ("experts.wi", "experts.wo")
            parameters = Kept(binding, tensors, turn).parameters(name)
            found |= {part: read(parameter) for part, parameter in parameters.items()}
    return found

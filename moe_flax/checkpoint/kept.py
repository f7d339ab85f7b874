"""Quantized parameters as they are stored: values and scales, both in our layout."""

import typing as tp

import ml_dtypes
import numpy as np

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.layouts import parse, rearrange
from moe_flax.checkpoint.mapping import Binding, Tensors
from moe_flax.checkpoint.quantized import QuantizedTensor


def keep(binding: Binding, tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Reads a parameter without dequantizing it.

    Args:
      binding: where it lies; its tensors are all quantized in one way.
      tensors: the checkpoint's `Logical` tensors.

    Returns:
      Values in the parameter's shape (float8, or int8 for packed int4; 4-bit floats become
      float8_e4m3fn, which holds them exactly), and float32 scales with as many axes, each 1, the
      whole size, or one a window: what `moe_flax.quantize.dequantize` takes.

    Raises:
      CheckpointError: blocks of scales lie across gate and up, so no such scales exist.
    """
    values: list[np.ndarray] = []
    scales: list[np.ndarray] = []
    stored, ours = binding.block_axes
    experts = range(binding.sizes["E"]) if binding.by_expert else (0,)
    branches = range(binding.sizes["J"]) if binding.by_branch else (0,)
    for expert in experts:
        for branch in branches:
            tensor = tensors[binding.key(expert, branch)]
            if not isinstance(tensor, QuantizedTensor):
                raise fault("is not quantized", tensor=binding.key(expert, branch))
            rows = slice(expert, expert + 1) if binding.rows_by_expert == 1 else None
            value, scale, windows = tensor.split(rows)
            if rows is not None:
                value, scale = value[0], scale[0] if scale.shape[0] == 1 else scale
                windows = windows[1:]
            if value.dtype == np.float32:
                value = value.astype(ml_dtypes.float8_e4m3fn)
            sizes = _scale_sizes(stored, binding, scale.shape, windows, tensor.name)
            values.append(rearrange(value, stored, ours, binding.sizes))
            scales.append(rearrange(scale, stored, ours, sizes))
    lead = ((len(experts),) if binding.by_expert else ()) + (
        (len(branches),) if binding.by_branch else ()
    )
    return _stack(values, lead), _stack(scales, lead)


def _stack(blocks: list[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    return np.stack(blocks).reshape(lead + blocks[0].shape)


def _scale_sizes(
    stored: str,
    binding: Binding,
    shape: tuple[int, ...],
    windows: tuple[int, ...],
    name: str,
) -> dict[str, int]:
    """The size of each layout axis of the scales."""
    sizes = dict(binding.sizes)
    for group, count, window in zip(parse(stored), shape, windows, strict=True):
        whole = int(np.prod([binding.sizes[atom] for atom in group]))
        if count == whole:
            continue
        if len(group) == 1 or count == 1:
            sizes |= dict.fromkeys(group, 1) | {group[-1]: count}
        elif window > 0 and binding.sizes[group[-1]] % window == 0:
            sizes[group[-1]] = binding.sizes[group[-1]] // window
        else:
            raise fault(
                f"blocks of {window} lie across the parts of axis {' '.join(group)}"
                f" ({[binding.sizes[atom] for atom in group]}); load it dequantized",
                tensor=name,
            )
    return sizes


def keep_parameters(bindings: tp.Mapping[str, Binding], tensors: Tensors) -> dict[str, np.ndarray]:
    """All parameters of a layer; quantized ones as ``name`` and ``name_scale``."""
    found: dict[str, np.ndarray] = {}
    for name, binding in bindings.items():
        if all(isinstance(tensors[key], QuantizedTensor) for key in binding.keys) and binding.keys:
            found[name], found[f"{name}_scale"] = keep(binding, tensors)
    return found

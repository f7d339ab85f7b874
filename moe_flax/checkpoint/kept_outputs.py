"""Layers' quantized weights back to the files that they came from."""

import dataclasses
import functools
import typing as tp

import numpy as np

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.kept import Kept
from moe_flax.checkpoint.layouts import rearrange
from moe_flax.checkpoint.mapping import Binding, Parameter, Tensors, stored_chunks, turned
from moe_flax.checkpoint.quantized import QuantizedTensor, pack
from moe_flax.checkpoint.writer import Output


def kept_outputs(kept: Kept, values: Parameter, scales: Parameter) -> list[Output]:
    """The stored tensors of a layer's values and scales.

    Raises:
      CheckpointError: scales that the format cannot say.
    """
    found = []
    binding = dataclasses.replace(kept.binding, sizes=kept.sizes)
    ours = turned(values) if kept.transposed else values
    for key, (expert, branch) in kept.binding.keys.items():
        tensor = kept.tensor(expert, branch)
        merged = functools.partial(_merged, kept, expert, branch, scales)
        found.append(_values_output(kept, tensor, binding, key, ours))
        found.append(_scale_output(tensor, merged))
        found += [stored_output(tensor, role) for role in list(tensor.parts)[2:]]
    return found


def _values_output(
    kept: Kept, tensor: QuantizedTensor, binding: Binding, key: str, ours: Parameter
) -> Output:
    stored = tensor.parts["values"]

    def chunks() -> tp.Iterator[np.ndarray]:
        for chunk in stored_chunks(binding, key, ours, kept.dtype):
            coded = chunk if kept.packed else pack(chunk, tensor.format.coding, tensor.name)
            yield np.ascontiguousarray(coded).view(stored.dtype)

    return Output(tensor.keys[0], stored.dtype, tuple(stored.shape), chunks)


def _merged(kept: Kept, expert: int, branch: int, scales: Parameter) -> np.ndarray:
    """The scales of a stored tensor, of all its experts, with as many axes as its values."""
    by_row = kept.binding.rows_by_expert == 1
    experts = range(kept.binding.sizes["E"]) if by_row else (expert,)
    blocks = []
    for e in experts:
        at = (e,) * kept.binding.by_expert + (branch,) * kept.binding.by_branch
        part = np.empty((1,) * len(at) + tuple(scales.shape[len(at) :]), scales.dtype)
        rest = tuple(slice(0, n) for n in part.shape[len(at) :])
        scales.read_into(part, tuple(slice(i, i + 1) for i in at) + rest)
        block = part.reshape(part.shape[len(at) :]).astype(np.float32)
        for axis, (window, fitting) in kept.repeats.items():
            size, place = kept.binding.sizes[axis], kept.axes[1].split().index(axis)
            coarse = np.take(block, np.arange(0, size, window) // fitting, axis=place)
            again = np.take(coarse, np.arange(0, size, fitting) // window, axis=place)
            if not np.array_equal(again, block, equal_nan=True):
                name = kept.tensor(expert, branch).name
                raise fault(f"scales differ within its windows of {window}", tensor=name)
            block = coarse
        blocks.append(rearrange(block, kept.axes[1], kept.axes[0], kept.stored_scales[0]))
    return np.stack(blocks) if by_row else blocks[0]


def _scale_output(tensor: QuantizedTensor, merged: tp.Callable[[], np.ndarray]) -> Output:
    stored = tensor.parts["scale"]
    return Output(
        tensor.keys[1],
        stored.dtype,
        tuple(stored.shape),
        lambda: [np.ascontiguousarray(tensor.encode_scales(merged()))],
    )


def stored_output(tensor: QuantizedTensor, role: str) -> Output:
    """One of the stored tensors of a quantized one, as it is."""
    stored = tensor.parts[role]
    name = tensor.keys[list(tensor.parts).index(role)]
    chunks = lambda: [np.ascontiguousarray(tensor.parts[role])]  # noqa: E731
    return Output(name, stored.dtype, tuple(stored.shape), chunks)


def unchanged_outputs(binding: Binding, tensors: Tensors, parameter: Parameter) -> list[Output]:
    """The stored tensors of a quantized parameter that the layer holds as floats.

    Raises:
      CheckpointError: when they are written, where the floats are others than were read.
    """
    found = []
    for key in binding.keys:
        tensor = tensors[key]
        values = stored_output(tensor, "values")

        def chunks(
            key: str = key, tensor: QuantizedTensor = tensor, values: Output = values
        ) -> tp.Iterable[np.ndarray]:
            for i, chunk in enumerate(stored_chunks(binding, key, parameter, parameter.dtype)):
                rows = slice(i, i + 1) if binding.rows_by_expert == 1 else None
                exact = tensor.decode(rows).astype(parameter.dtype)
                if not np.array_equal(chunk, exact.reshape(chunk.shape), equal_nan=True):
                    problem = "has changed since it was loaded, and its layer holds no scales"
                    raise fault(f"{problem}; load it dequantized to save it", tensor=key)
            return values.chunks()

        found.append(dataclasses.replace(values, chunks=chunks))
        found += [stored_output(tensor, role) for role in list(tensor.parts)[1:]]
    return found

"""The tensors that a layer is stored as."""

import dataclasses
import typing as tp

import numpy as np

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.kept import Kept, is_quantized
from moe_flax.checkpoint.kept_outputs import kept_outputs, unchanged_outputs
from moe_flax.checkpoint.mapping import (
    ArrayParameter,
    Binding,
    Parameter,
    Tensors,
    read,
    stored_chunks,
    turned,
)
from moe_flax.checkpoint.modules import named_variables
from moe_flax.checkpoint.quantized import QuantizedTensor
from moe_flax.checkpoint.reader import DTYPES
from moe_flax.checkpoint.source import Layer, Source
from moe_flax.checkpoint.writer import Output
from moe_flax.layers import MoE


def module_outputs(
    layer: Layer,
    module: MoE,
    dtypes: tp.Mapping[str, np.dtype],
    quantized: tp.Mapping[str, QuantizedTensor],
) -> list[Output]:
    """The stored tensors of a module, what was kept quantized in its format.

    Args:
      layer: where it goes.
      module: the MoE layer.
      dtypes: see `layer_outputs`.
      quantized: the quantized tensors that its parameters were read from.

    Raises:
      CheckpointError: quantized weights that would go elsewhere than they came from.
    """
    parameters: dict[str, Parameter] = {
        name: ArrayParameter(variable[...]) for name, variable in named_variables(module)
    }
    outputs: list[Output] = []
    turn = module.experts.transposed
    for name in ("experts.wi", "experts.wo"):
        scale = parameters.pop(f"{name}_scale", None)
        if scale is None:
            parameters[name] = turned(parameters[name]) if turn else parameters[name]
            continue
        binding = layer.bindings[name]
        if not is_quantized(binding, quantized):
            raise fault(
                f"layer {layer.index} holds {name} quantized, and it was not loaded from form"
                f" {layer.form.name} of {layer.config.family}; quantized weights go back to where"
                " they came from, load them dequantized to write another form"
            )
        kept = _as_held(binding, quantized, parameters[name], scale, turn)
        outputs += kept_outputs(kept, parameters.pop(name), scale)
    for name, binding in layer.bindings.items():
        if name in parameters and is_quantized(binding, quantized):
            outputs += unchanged_outputs(binding, quantized, parameters.pop(name))
    bindings = {name: b for name, b in layer.bindings.items() if name in parameters}
    if set(layer.bindings) - set(bindings) and set(bindings) != set(parameters):
        bindings = dict(layer.bindings)  # for the error that says which
    floats = dataclasses.replace(layer, bindings=bindings)
    return outputs + layer_outputs(floats, parameters, dtypes)


def _as_held(
    binding: Binding, tensors: Tensors, values: Parameter, scale: Parameter, turn: bool
) -> Kept:
    """How the layer holds a weight: scales may be repeated for the mesh it was loaded on."""
    shards = 1
    while True:
        kept = Kept(binding, tensors, turn, shards)
        shapes = [p.shape for p in kept.parameters("").values()]
        if shapes == [values.shape, scale.shape]:
            return kept
        shards += 1
        if shards > binding.sizes["F"]:
            raise fault(
                f"values of shape {values.shape} with scales of {scale.shape} are not what"
                f" {binding.key(0, 0)!r} was read as, {shapes}"
            )


@dataclasses.dataclass(frozen=True)
class Cast:
    """The dtypes that a conversion gives floats. Router weights and vectors keep theirs always.

    Args:
      dtype: of the experts' weights and of other matrices; None keeps that of floats, and gives
        what was quantized `quantized`.
      quantized: such as the model's own dtype: float32 would only take room, since neither 8 nor 4
        bits and their scale need it.
    """

    dtype: np.dtype | None
    quantized: np.dtype

    def config(self, hf_config: tp.Mapping[str, tp.Any]) -> dict[str, tp.Any]:
        """config.json for the tensors that are written: it names the dtype that was asked for."""
        found = _renamed(hf_config, self.dtype.name) if self.dtype is not None else dict(hf_config)
        if self.dtype is not None and not {"dtype", "torch_dtype"} & set(found):
            found["torch_dtype"] = self.dtype.name
        return found

    def parameter(self, source: Source, name: str, binding: Binding) -> np.dtype | None:
        """What a layer's parameter is cast to; None for what it is."""
        if name.startswith("router."):
            return None
        found = any(key in source.quantized for key in binding.keys)
        return self.dtype or (self.quantized if found else None)

    def rest(self, source: Source, name: str) -> Output:
        """A tensor that belongs to no layer's parameter."""
        tensor = source.tensors[name]
        dtype = np.dtype(tensor.dtype)
        if dtype in _FLOATS and len(tensor.shape) > 1 and not source.family.routes(name):
            dtype = self.dtype or (self.quantized if name in source.quantized else dtype)

        def chunks() -> list[np.ndarray]:
            return [np.asarray(source.tensors[name]).astype(dtype, copy=False)]

        return Output(name, dtype, tuple(tensor.shape), chunks)


def _renamed(config: tp.Mapping[str, tp.Any], dtype: str) -> dict[str, tp.Any]:
    """A config.json, its parts included, with another dtype wherever it names one."""
    return {
        key: _renamed(value, dtype)
        if isinstance(value, dict)
        else dtype
        if key in ("dtype", "torch_dtype") and isinstance(value, str)
        else value
        for key, value in config.items()
    }


_FLOATS: tp.Final = tuple(DTYPES[name] for name in ("F32", "F16", "BF16"))


def layer_outputs(
    layer: Layer, parameters: tp.Mapping[str, Parameter], dtypes: tp.Mapping[str, np.dtype]
) -> list[Output]:
    """The stored tensors of one layer.

    A tensor keeps the dtype it was loaded with where its values survive that; a router that has
    been trained since is written in float32.
    """
    outputs = []
    if set(parameters) != set(layer.bindings):
        differing = sorted(set(parameters) ^ set(layer.bindings))
        raise fault(f"layer {layer.index}: {differing} are in the layer or the family, not in both")
    for name, binding in layer.bindings.items():
        parameter = parameters[name]
        if tuple(parameter.shape) != binding.shape:
            raise fault(
                f"layer {layer.index}: {name} has shape {tuple(parameter.shape)},"
                f" its configuration makes it {binding.shape}"
            )
        _check_one_value(layer, name, binding, parameter)
        for key in binding.keys:
            dtype = dtypes.get(key, parameter.dtype)
            if dtype != parameter.dtype and not _survives(binding, key, parameter, dtype):
                dtype = parameter.dtype
            outputs.append(_output(binding, key, parameter, dtype))
    return outputs


def _check_one_value(layer: Layer, name: str, binding: Binding, parameter: Parameter) -> None:
    """Raises a CheckpointError where the form stores less than the parameter says."""
    if binding.entry.key is None:
        if np.any(read(parameter)):
            raise fault(
                f"layer {layer.index}: {name} is not zero, and form {layer.form.name} of"
                f" {layer.config.family} has no place for it"
            )
    elif binding.one_for_all_experts:
        values = read(parameter)
        others = [
            e for e, v in enumerate(values) if not np.array_equal(v, values[0], equal_nan=True)
        ]
        if others:
            raise fault(
                f"layer {layer.index}: form {layer.form.name} of {layer.config.family} stores one"
                f" {name} for all experts; those of experts {others} differ from expert 0's"
            )


def _output(binding: Binding, key: str, parameter: Parameter, dtype: np.dtype) -> Output:
    return Output(
        key, dtype, binding.stored_shape, lambda: stored_chunks(binding, key, parameter, dtype)
    )


def _survives(binding: Binding, key: str, parameter: Parameter, dtype: np.dtype) -> bool:
    """Whether a tensor's values are the same after a cast to ``dtype``."""
    return all(
        np.array_equal(chunk, chunk.astype(dtype).astype(chunk.dtype), equal_nan=True)
        for chunk in stored_chunks(binding, key, parameter, parameter.dtype)
    )

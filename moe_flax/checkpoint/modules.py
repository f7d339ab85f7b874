"""Between flat parameters and nnx modules: every variable is written exactly once."""

import dataclasses
import typing as tp

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from moe_flax import sharding
from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.mapping import Parameter, read
from moe_flax.config import MoEConfig
from moe_flax.layers import MoE
from moe_flax.quantized_weights import quantized_logical_axes


def parameter_dtype(name: str, stored: np.dtype, dtype: tp.Any) -> np.dtype:
    """The dtype a parameter gets: the router's stay float32, the rest are cast where asked."""
    return np.dtype(np.float32 if name.startswith("router.") else dtype or stored)


def build_moe(
    config: MoEConfig,
    parameters: tp.Mapping[str, Parameter],
    *,
    dtype: tp.Any = None,
    mesh: sharding.AnyMesh | None = None,
    rules: sharding.Rules | None = None,
    transposed: bool = False,
) -> MoE:
    """Makes a layer around given parameters; each device's part is read on its own.

    Args:
      config: the layer's configuration.
      parameters: all of its parameters by name, such as "experts.wi"; quantized ones and
        "experts.wi_scale", "experts.wo_scale" as the layer holds them.
      dtype: dtype of the experts' weights; None keeps theirs.
      mesh, rules: see `moe_flax.MoE`.
      transposed: whether quantized experts lie transposed, and what is given of them as well.

    Raises:
      CheckpointError: a parameter is missing or left over, or has another shape.
    """
    scales = {name for name in parameters if name.endswith("_scale") and name in HELD_NAMES}
    held = {name for name in HELD_NAMES if name in parameters} if scales else set()
    stored = np.float32 if held else parameters["experts.wi"].dtype
    module = nnx.eval_shape(
        lambda: MoE.from_config(
            config, param_dtype=dtype or stored, mesh=mesh, rules=rules, rngs=nnx.Rngs(0)
        )
    )
    axes = mesh_axes(mesh, rules)
    variables = dict(named_variables(module))
    differing = set(variables) ^ (set(parameters) - scales)
    if differing:
        raise fault(f"parameters {sorted(differing)} are in the layer or the files, not in both")
    for name in sorted(set(variables) - held):
        variable, parameter = variables[name], parameters[name]
        if tuple(variable.shape) != parameter.shape:
            raise fault(f"{name} has shape {parameter.shape}, the layer's {tuple(variable.shape)}")
        to = parameter_dtype(name, parameter.dtype, dtype)
        target = None
        if axes is not None:
            target = NamedSharding(axes.mesh, axes.spec(name, parameter.shape))
        variable.set_value(place_parameter(parameter, to, target))
    if held:
        _hold(module, {n: parameters[n] for n in held}, dtype, axes, rules, transposed)
    return module


HELD_NAMES: tp.Final = ("experts.wi", "experts.wo", "experts.wi_scale", "experts.wo_scale")


def mesh_axes(
    mesh: sharding.AnyMesh | None, rules: sharding.Rules | None
) -> sharding.MeshAxes | None:
    """The mesh given or in scope, with devices, and the use of its axes."""
    active = sharding.active_mesh(mesh)
    if isinstance(active, AbstractMesh):  # the mesh in scope: arrays need its devices
        active = jax.sharding.get_mesh()
    return sharding.resolve_axes(active, rules) if active is not None else None


def _hold(
    module: MoE,
    parameters: tp.Mapping[str, Parameter],
    dtype: tp.Any,
    axes: sharding.MeshAxes | None,
    rules: sharding.Rules | None,
    transposed: bool,
) -> None:
    """Puts the experts' weights and scales into the layer, each where its devices are."""
    shapes = {
        name.removesuffix("_scale"): parameter.shape
        for name, parameter in parameters.items()
        if name.endswith("_scale")
    }
    logical = quantized_logical_axes(shapes, transposed=transposed)
    arrays: dict[str, tp.Any] = {}
    metadata: dict[str, dict[str, tp.Any]] = {}
    for name, parameter in parameters.items():
        leaf, target = name.removeprefix("experts."), None
        boxed: dict[str, tp.Any] = {
            "out_sharding": sharding.logical_axes(name, logical),
            "sharding_rules": sharding.flax_rules(rules),
        }
        if axes is not None:
            spec = dataclasses.replace(axes, logical=logical).spec(name, parameter.shape)
            target, boxed = NamedSharding(axes.mesh, spec), {"out_sharding": tuple(spec)}
        kept = name.endswith("_scale") or f"{name}_scale" in parameters
        to = parameter.dtype if kept else parameter_dtype(name, parameter.dtype, dtype)
        arrays[leaf], metadata[leaf] = place_parameter(parameter, to, target), boxed
    module.experts.hold_quantized(**arrays, transposed=transposed, metadata=metadata)


def place_parameter(
    parameter: Parameter, dtype: np.dtype, target: NamedSharding | None
) -> jax.Array:
    """Reads a parameter into device memory, only the parts that this process' devices hold."""
    if target is None:
        return jax.device_put(read(parameter, dtype=dtype))

    shape = parameter.shape
    devices: dict[tuple[tuple[int, int], ...], list[tp.Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    parts: list[jax.Array] = []
    for bounds, holders in devices.items():  # one part at a time in host memory, read once
        part = read(parameter, tuple(slice(*b) for b in bounds), dtype)
        parts += [jax.device_put(part, device) for device in holders]
    return jax.make_array_from_single_device_arrays(shape, target, parts, dtype=dtype)


def named_variables(module: MoE) -> tp.Iterator[tuple[str, nnx.Variable]]:
    """The layer's variables by their names in `moe_flax.sharding.LOGICAL_AXES`."""
    for prefix in ("router", "latent", "experts", "shared"):
        part = getattr(module, prefix)
        for name, variable in vars(part).items() if part is not None else ():
            if isinstance(variable, nnx.Variable):
                yield f"{prefix}.{name}", variable

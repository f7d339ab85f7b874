"""Between flat parameters and nnx modules: every variable is written exactly once."""

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
) -> MoE:
    """Makes a layer around given parameters; each device's part is read on its own.

    Args:
      config: the layer's configuration.
      parameters: all of its parameters by name, such as "experts.wi".
      dtype: dtype of the experts' weights; None keeps theirs.
      mesh, rules: see `moe_flax.MoE`.

    Raises:
      CheckpointError: a parameter is missing or left over, or has another shape.
    """
    stored = parameters["experts.wi"].dtype
    module = nnx.eval_shape(
        lambda: MoE.from_config(
            config, param_dtype=dtype or stored, mesh=mesh, rules=rules, rngs=nnx.Rngs(0)
        )
    )
    active = sharding.active_mesh(mesh)
    if isinstance(active, AbstractMesh):  # the mesh in scope: arrays need its devices
        active = jax.sharding.get_mesh()
    axes = sharding.resolve_axes(active, rules) if active is not None else None
    variables = dict(named_variables(module))
    differing = set(variables) ^ set(parameters)
    if differing:
        raise fault(f"parameters {sorted(differing)} are in the layer or the files, not in both")
    for name, variable in variables.items():
        parameter = parameters[name]
        if tuple(variable.shape) != parameter.shape:
            raise fault(f"{name} has shape {parameter.shape}, the layer's {tuple(variable.shape)}")
        to = parameter_dtype(name, parameter.dtype, dtype)
        target = None
        if axes is not None:
            target = NamedSharding(axes.mesh, axes.spec(name, parameter.shape))
        variable.set_value(place_parameter(parameter, to, target))
    return module


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
    for prefix in ("router", "experts", "shared"):
        part = getattr(module, prefix)
        for name, variable in vars(part).items() if part is not None else ():
            if isinstance(variable, nnx.Variable):
                yield f"{prefix}.{name}", variable

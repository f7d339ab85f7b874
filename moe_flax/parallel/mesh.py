"""Runs a per-device layer over a mesh: tokens and parameters split, results put back together."""

import dataclasses
import functools
import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from moe_flax.sharding import LogicalAxes, MeshAxes, logical_axes, reshard

Parameters: tp.TypeAlias = dict[str, jax.Array]  # by the names of `sharding.LOGICAL_AXES`


@dataclasses.dataclass(frozen=True)
class DeviceAxes:
    """The manual mesh axes, on one device, that split E, D and F of what it holds, and tokens.

    ``logical`` is that of `MeshAxes`.
    """

    expert: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    logical: LogicalAxes = ()


class DeviceLayer(tp.Protocol):
    """A layer on one device: its rows of the result, and a pytree that all devices agree on."""

    @property
    def check_vma(self) -> bool:
        """Whether ``shard_map`` is to check which mesh axes values vary over."""
        ...

    def __call__(
        self,
        parameters: Parameters,
        tokens: Float[Array, "t D"],
        mask: Bool[Array, " t"],
        router_tokens: Float[Array, "t D"] | None,
        axes: DeviceAxes,
        num_tokens: int,
    ) -> tuple[Float[Array, "t D"], tp.Any]: ...


# Tokens, their mask, and what the router sees of them if that is something else.
Rows: tp.TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]


def over_mesh(
    forward: DeviceLayer,
    parameters: Parameters,
    shapes: tp.Mapping[str, tuple[int, ...]],
    inputs: Float[Array, "... D"],
    mask: Bool[Array, "..."],
    axes: MeshAxes,
    router_inputs: Float[Array, "... D"] | None = None,
) -> tuple[Float[Array, "... D"], tp.Any]:
    """Calls ``forward`` on every device with its share of tokens and parameters.

    Axes that are manual already (inside a caller's ``shard_map``) are used as they are: the
    parameters' shapes there tell whether the caller split them.

    Args:
      forward: the layer on one device; ``num_tokens`` counts the tokens of all devices.
      parameters: arrays by the names of ``LOGICAL_AXES``.
      shapes: their whole shapes.
      inputs: [..., D]; the number of tokens need not divide over the mesh.
      mask: [...], False for tokens that do not count.
      axes: the mesh and the use of its axes.
      router_inputs: [..., D], or None where the router sees ``inputs``.
    """
    manual = frozenset(getattr(axes.mesh, "manual_axes", ()))
    inside = _manual_axes(parameters, shapes, inputs, axes, manual)
    outside = axes.without(manual)
    everything = DeviceAxes(
        expert=inside.expert + outside.expert,
        embed=inside.embed + outside.embed,
        mlp=inside.mlp + outside.mlp,
        tokens=inside.tokens + outside.tokens,
        logical=axes.logical,
    )
    num_tokens = math.prod(inputs.shape[:-1]) * axes.size(inside.tokens)
    if manual >= set(axes.mesh.axis_names):  # on one device already
        given = _flatten((inputs, mask, router_inputs))
        rows, rest = forward(parameters, *given, everything, num_tokens)
        return rows.reshape(inputs.shape), rest

    mesh = axes.mesh
    row_spec = PartitionSpec(outside.tokens or None)
    padding = -math.prod(inputs.shape[:-1]) % outside.size(outside.tokens)
    explicit = AxisType.Explicit in mesh.axis_types
    home = jax.typeof(inputs).sharding.spec if explicit else PartitionSpec()
    # Explicit shardings must divide at every step: rows lie as the leading dimension does, or,
    # where padding changes their number, on every device.
    between = PartitionSpec(home[0] if explicit and inputs.ndim > 1 and not padding else None)
    given: Rows = (inputs, mask, router_inputs)
    if explicit:
        given = jax.tree.map(lambda x: reshard(x, mesh, between), given)
        parameters = {n: reshard(w, mesh, outside.spec(n, w.shape)) for n, w in parameters.items()}
    given = _flatten(given)
    if padding:
        given = jax.tree.map(lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))), given)
    if explicit:
        given = jax.tree.map(lambda x: reshard(x, mesh, row_spec), given)

    rows, rest = _on_devices(
        parameters,
        given,
        forward=forward,
        outside=outside,
        everything=everything,
        manual=manual,
        num_tokens=num_tokens,
    )
    if explicit:
        rows = reshard(rows, mesh, between)
    if padding:
        rows = rows[: rows.shape[0] - padding]
    rows = rows.reshape(inputs.shape)
    return (reshard(rows, mesh, home) if explicit else rows), rest


@functools.partial(
    jax.jit, static_argnames=("forward", "outside", "everything", "manual", "num_tokens")
)
def _on_devices(
    parameters: Parameters,
    given: Rows,
    *,
    forward: DeviceLayer,
    outside: MeshAxes,
    everything: DeviceAxes,
    manual: frozenset[str],
    num_tokens: int,
) -> tuple[jax.Array, tp.Any]:
    """The ``shard_map``; compiled once for equal arguments also where the caller does not jit."""

    def on_device(p: Parameters, here: Rows) -> tuple[jax.Array, tp.Any]:
        return forward(p, *here, everything, num_tokens)

    if manual:  # residuals of a shard_map in a shard_map do not lower: keep the inputs alone
        on_device = jax.checkpoint(on_device)
    mesh = outside.mesh
    rows = PartitionSpec(outside.tokens or None)
    weights = {name: outside.spec(name, w.shape) for name, w in parameters.items()}
    return jax.shard_map(
        on_device,
        mesh=mesh if isinstance(mesh, Mesh) else None,
        in_specs=(weights, rows),
        out_specs=(rows, PartitionSpec()),
        axis_names=set(mesh.axis_names) - manual,
        check_vma=forward.check_vma,
    )(parameters, given)


def _flatten(given: Rows) -> Rows:
    lead = given[1].ndim  # the mask has no D
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[lead:]), given)


def gather_embed(name: str, parameter: jax.Array, axes: DeviceAxes) -> jax.Array:
    """Brings a parameter's D together from the devices of ``axes.embed``.

    The result varies over those devices only where the tokens do.
    """
    if not axes.embed:
        return parameter
    logical = logical_axes(name, axes.logical)
    if "embed" not in logical:
        return parameter
    dimension = logical.index("embed")
    if set(axes.embed) <= set(axes.tokens):
        return jax.lax.all_gather(parameter, axes.embed, axis=dimension, tiled=True)
    size = parameter.shape[dimension]
    start = jax.lax.axis_index(axes.embed) * size
    whole = list(parameter.shape)
    whole[dimension] = size * jax.lax.axis_size(axes.embed)
    placed = jax.lax.dynamic_update_slice_in_dim(
        jax.lax.pcast(jnp.zeros(whole, parameter.dtype), axes.embed, to="varying"),
        parameter,
        start,
        dimension,
    )
    return jax.lax.psum(placed, axes.embed)


def _manual_axes(
    parameters: Parameters,
    shapes: tp.Mapping[str, tuple[int, ...]],
    tokens: jax.Array,
    axes: MeshAxes,
    manual: frozenset[str],
) -> DeviceAxes:
    """Which of the caller's manual axes split the parameters and the tokens."""

    def split(name: str, logical: tp.Literal["expert", "embed", "mlp"]) -> tuple[str, ...]:
        names = tuple(axis for axis in getattr(axes, logical) if axis in manual)
        dimension = logical_axes(name, axes.logical).index(logical)
        whole, here = shapes[name][dimension], parameters[name].shape[dimension]
        if here == whole:
            return ()
        if here * axes.size(names) == whole:
            return names
        raise ValueError(
            f"{name}: dimension {dimension} ({logical}) is {here} inside shard_map and {whole} in"
            f" all; expected {whole} or {whole} / {axes.size(names)} (manual axes {names})"
        )

    varying = jax.typeof(tokens).manual_axis_type.varying
    candidates = tuple(axis for axis in axes.tokens if axis in manual)
    tracked = any(
        jax.typeof(jax.lax.axis_index(axis)).manual_axis_type.varying for axis in candidates
    )  # False under check_vma=False: then tokens are taken to be split
    return DeviceAxes(
        expert=split("experts.wi", "expert"),
        embed=split("experts.wi", "embed"),
        mlp=split("experts.wi", "mlp"),
        tokens=tuple(axis for axis in candidates if axis in varying or not tracked),
    )

"""Runs a per-device layer over a mesh: tokens and parameters split, results put back together."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float

from moe_flax.sharding import LOGICAL_AXES, MeshAxes, reshard

Parameters: tp.TypeAlias = dict[str, jax.Array]  # by the names of LOGICAL_AXES


@dataclasses.dataclass(frozen=True)
class DeviceAxes:
    """The manual mesh axes, on one device, that split E, D and F of what it holds, and tokens."""

    expert: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


Forward: tp.TypeAlias = tp.Callable[
    [Parameters, Float[Array, "t D"], Bool[Array, " t"], DeviceAxes], tuple[jax.Array, tp.Any]
]


def over_mesh(
    forward: Forward,
    parameters: Parameters,
    shapes: tp.Mapping[str, tuple[int, ...]],
    tokens: Float[Array, "T D"],
    mask: Bool[Array, " T"],
    axes: MeshAxes,
) -> tuple[Float[Array, "T D"], tp.Any]:
    """Calls ``forward`` on every device with its share.

    Axes that are manual already (inside a caller's ``shard_map``) are used as they are: the
    parameters' shapes there tell whether the caller split them.

    Args:
      forward: from parameters, tokens, mask and axes of one device to its rows of the result and
        a pytree that is equal on all devices.
      parameters: arrays by the names of ``LOGICAL_AXES``.
      shapes: their whole shapes.
      tokens: [T, D]; T need not divide.
      mask: [T], False for tokens that do not count.
      axes: the mesh and the use of its axes.

    Returns:
      The rows [T, D] and the pytree.
    """
    manual = set(axes.mesh.manual_axes) if isinstance(axes.mesh, AbstractMesh) else set()
    inner = _manual_axes(parameters, shapes, tokens, axes, manual)
    own = tuple(axis for axis in axes.all if axis not in manual)
    if not own:
        return forward(parameters, tokens, mask, inner)

    def outer(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in manual)

    outer_axes = dataclasses.replace(
        axes,
        expert=outer(axes.expert),
        embed=outer(axes.embed),
        mlp=outer(axes.mlp),
        tokens=outer(axes.tokens),
    )
    everything = DeviceAxes(
        expert=inner.expert + outer_axes.expert,
        embed=inner.embed + outer_axes.embed,
        mlp=inner.mlp + outer_axes.mlp,
        tokens=inner.tokens + outer_axes.tokens,
    )
    weight_specs = {name: outer_axes.spec(name, w.shape) for name, w in parameters.items()}
    row_spec = PartitionSpec(outer_axes.tokens or None)

    explicit = AxisType.Explicit in axes.mesh.axis_types
    before = jax.typeof(tokens).sharding.spec if explicit else None
    total = tokens.shape[0]
    padding = -total % outer_axes.size(outer_axes.tokens)
    if explicit:
        if padding:  # rows that do not divide cannot keep an Explicit sharding
            tokens, mask = (reshard(x, axes.mesh, PartitionSpec()) for x in (tokens, mask))
        parameters = {n: reshard(w, axes.mesh, weight_specs[n]) for n, w in parameters.items()}
    if padding:
        tokens = jnp.pad(tokens, ((0, padding), (0, 0)))
        mask = jnp.pad(mask, (0, padding))
    if explicit:
        tokens, mask = (reshard(x, axes.mesh, row_spec) for x in (tokens, mask))

    rows, rest = jax.shard_map(
        lambda p, t, m: forward(p, t, m, everything),
        mesh=None if isinstance(axes.mesh, AbstractMesh) else axes.mesh,
        in_specs=(weight_specs, row_spec, row_spec),
        out_specs=(row_spec, PartitionSpec()),
        axis_names=set(own) if set(own) | manual != set(axes.mesh.axis_names) else set(),
    )(parameters, tokens, mask)

    if explicit and padding:
        rows = reshard(rows, axes.mesh, PartitionSpec())
    rows = rows[:total] if padding else rows
    return (reshard(rows, axes.mesh, before) if explicit and before is not None else rows), rest


def gather_embed(name: str, parameter: jax.Array, axes: DeviceAxes) -> jax.Array:
    """Brings a parameter's D together from the devices of ``axes.embed``.

    The result varies over those devices only where the tokens do.
    """
    logical = LOGICAL_AXES[name]
    if not axes.embed or "embed" not in logical:
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
    manual: set[str],
) -> DeviceAxes:
    """Which of the caller's manual axes split the parameters and the tokens."""

    def split(name: str, logical: tp.Literal["expert", "embed", "mlp"]) -> tuple[str, ...]:
        names = tuple(axis for axis in getattr(axes, logical) if axis in manual)
        dimension = LOGICAL_AXES[name].index(logical)
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

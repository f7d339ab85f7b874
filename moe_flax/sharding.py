"""Logical axes to mesh axes: which part of a parameter, and which tokens, a device holds."""

import dataclasses
import math
import types
import typing as tp

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AnyMesh: tp.TypeAlias = Mesh | AbstractMesh
Rules: tp.TypeAlias = (
    tp.Mapping[str, str | tp.Sequence[str] | None]
    | tp.Sequence[tuple[str, str | tp.Sequence[str] | None]]
)

# Each mesh axis named here is used where the mesh has it; a caller's own rules must hold.
DEFAULT_RULES: tp.Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "expert": ("expert",),
        "embed": ("fsdp",),
        "mlp": ("tensor",),
        "tokens": ("data", "fsdp", "expert"),
    }
)

LOGICAL_AXES: tp.Mapping[str, tuple[str | None, ...]] = types.MappingProxyType(
    {
        "router.kernel": ("embed", None),
        "router.bias": (None,),
        "router.correction_bias": (None,),
        "router.per_expert_scale": (None,),
        "experts.wi": ("expert", None, "embed", "mlp"),
        "experts.wi_bias": ("expert", None, "mlp"),
        "experts.wo": ("expert", "mlp", "embed"),
        "experts.wo_bias": ("expert", "embed"),
        "latent.wi": ("embed", None),
        "latent.wo": (None, "embed"),
        "shared.wi": (None, "embed", "mlp"),
        "shared.wo": ("mlp", "embed"),
        "shared.gate": ("embed", None),
    }
)

LogicalAxes: tp.TypeAlias = tuple[tuple[str, tuple[str | None, ...]], ...]  # a dict that hashes


def logical_axes(parameter: str, others: LogicalAxes = ()) -> tuple[str | None, ...]:
    """A parameter's logical axes: those that ``others`` has for it, else ``LOGICAL_AXES``'."""
    return dict(others).get(parameter) or LOGICAL_AXES[parameter]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh, and the mesh axes each logical axis lies on; axes of size 1 are left out.

    Attributes:
      mesh: the mesh.
      expert, embed, mlp: axes that split E, D and F of the parameters.
      tokens: axes that split the tokens.
      logical: the logical axes of parameters that lie otherwise than ``LOGICAL_AXES`` says, and
        of those that it does not name.
    """

    mesh: AnyMesh
    expert: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]
    tokens: tuple[str, ...]
    logical: "LogicalAxes" = ()

    def size(self, axes: tp.Iterable[str]) -> int:
        """Devices along the given mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def without(self, names: tp.Collection[str]) -> "MeshAxes":
        """The same less the mesh axes given."""

        def rest(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis not in names)

        return MeshAxes(
            self.mesh,
            rest(self.expert),
            rest(self.embed),
            rest(self.mlp),
            rest(self.tokens),
            self.logical,
        )

    def spec(self, parameter: str, shape: tp.Sequence[int]) -> PartitionSpec:
        """The PartitionSpec of a parameter.

        Args:
          parameter: a name of ``LOGICAL_AXES`` or of ``logical``, such as "experts.wi".
          shape: its whole shape.

        Raises:
          ValueError: a size is not a multiple of the devices that share it.
        """
        entries = []
        for dimension, (size, logical) in enumerate(
            zip(shape, logical_axes(parameter, self.logical), strict=True)
        ):
            axes = getattr(self, logical) if logical else ()
            if size % self.size(axes):
                raise ValueError(
                    f"{parameter} of shape {tuple(shape)}: dimension {dimension} ({logical}) of"
                    f" size {size} does not divide over mesh axes"
                    f" { ({axis: self.mesh.shape[axis] for axis in axes}) }; change the size, the"
                    " mesh, or the rules"
                )
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return PartitionSpec(*entries)


def active_mesh(mesh: AnyMesh | None = None) -> AnyMesh | None:
    """The mesh given, else the one in scope (``jax.set_mesh``), else None.

    Inside a caller's ``shard_map`` the one in scope wins: it knows which axes are manual.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, AbstractMesh or None, got {mesh!r}")
    scope = jax.sharding.get_abstract_mesh()
    if not scope.empty and (mesh is None or scope.manual_axes):
        return scope
    return mesh


def check_scope(mesh: AnyMesh | None) -> None:
    """Raises a ValueError where a mesh in scope has other axes than the one to be used."""
    scope = jax.sharding.get_abstract_mesh()
    if mesh is None or scope.empty:
        return
    ours, theirs = ((dict(m.shape), tuple(t.name for t in m.axis_types)) for m in (mesh, scope))
    if ours != theirs:
        raise ValueError(
            f"the layer's mesh has axes {ours[0]} of types {ours[1]}, the one in scope"
            f" (jax.set_mesh) {theirs[0]} of types {theirs[1]}: give the layer no mesh, or call it"
            " in the scope of its own"
        )


def resolve_axes(mesh: AnyMesh, rules: Rules | None = None) -> MeshAxes:
    """Looks up which mesh axes the logical axes lie on.

    Args:
      mesh: any mesh, of Auto, Explicit or Manual axes.
      rules: logical axis ("expert", "embed", "mlp", "tokens") to a mesh axis, several, or None.
        What is not named keeps its default.

    Raises:
      ValueError: a rule names an unknown logical or mesh axis, or one mesh axis would split two
        dimensions of a parameter, or both tokens and "mlp".
    """
    given = normalize_rules(rules)
    axes: dict[str, tuple[str, ...]] = {}
    for logical, default in DEFAULT_RULES.items():
        names = given.get(logical, default)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing and logical in given:
            raise ValueError(
                f"rule {logical!r} -> {names}: no mesh axis {missing}; the mesh has"
                f" {dict(mesh.shape)}"
            )
        axes[logical] = tuple(name for name in names if name in mesh.axis_names)
    for parameter, first, second in (
        ("experts.wi", "expert", "embed"),
        ("experts.wi", "expert", "mlp"),
        ("experts.wi", "embed", "mlp"),
        ("tokens and experts.wi", "tokens", "mlp"),
    ):
        twice = set(axes[first]) & set(axes[second])
        if twice:
            raise ValueError(
                f"{parameter}: mesh axis {sorted(twice)} is asked for by both {first!r} and"
                f" {second!r}; the mesh has {dict(mesh.shape)}"
            )
    trimmed = {
        logical: tuple(name for name in names if mesh.shape[name] > 1)
        for logical, names in axes.items()
    }
    return MeshAxes(mesh, trimmed["expert"], trimmed["embed"], trimmed["mlp"], trimmed["tokens"])


def flax_rules(rules: Rules | None) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """The rules for parameters in the form that Flax's ``sharding_rules`` metadata takes."""
    merged = {**DEFAULT_RULES, **normalize_rules(rules)}
    return tuple(
        (logical, names if len(names) > 1 else names[0] if names else None)
        for logical, names in merged.items()
        if logical != "tokens"
    )


def normalize_rules(rules: Rules | None) -> dict[str, tuple[str, ...]]:
    """Rules in one form: logical axis to a tuple of mesh axes.

    Raises:
      ValueError: an unknown logical axis, or one that is named twice.
    """
    pairs = list(rules.items() if isinstance(rules, tp.Mapping) else rules or ())
    result: dict[str, tuple[str, ...]] = {}
    for logical, names in pairs:
        if logical not in DEFAULT_RULES:
            raise ValueError(
                f"unknown logical axis {logical!r} in rules; allowed: {sorted(DEFAULT_RULES)}"
            )
        if logical in result:
            raise ValueError(f"rules name logical axis {logical!r} twice: {pairs}")
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        if len(set(names)) != len(names):
            raise ValueError(f"rule {logical!r} -> {names} asks for one mesh axis twice")
        result[logical] = names
    return result


def mesh_platform(mesh: AnyMesh | None) -> str | None:
    """The platform of a mesh's devices ("cpu", "gpu", "tpu"), None where it is not known."""
    platform = getattr(_any_device(mesh), "platform", None)
    return "gpu" if platform == "cuda" else platform


def mesh_device_kind(mesh: AnyMesh | None) -> str | None:
    """The kind of a mesh's devices, such as "TPU v6 lite", None where it is not known."""
    return getattr(_any_device(mesh), "device_kind", None)


def _any_device(mesh: AnyMesh | None) -> tp.Any:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    return getattr(mesh, "abstract_device", None)


def reshard(x: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
    """Moves x to a sharding: a reshard on Explicit axes, a constraint on Auto ones."""
    used = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    types_ = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds = {types_[name] for name in used if name is not None}
    sharding = NamedSharding(mesh, spec)
    if kinds == {AxisType.Auto} or (not kinds and AxisType.Explicit not in types_.values()):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.sharding.reshard(x, sharding)


def place(
    make: tp.Callable[[jax.Array], jax.Array], key: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    """Makes an array from a random key directly in its sharding: no device holds it whole."""
    if sharding is None:
        return make(key)
    if isinstance(key, Tracer) or isinstance(sharding.mesh, AbstractMesh):
        return reshard(make(key), sharding.mesh, sharding.spec)
    return jax.jit(make, out_shardings=sharding)(key)

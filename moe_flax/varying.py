"""Mesh axes that values vary over inside ``jax.shard_map``."""

import typing as tp

import jax


def align_varying(*operands: jax.Array | None) -> list:
    """Makes operands vary over the same mesh axes; outside ``jax.shard_map`` it does nothing.

    A loop's carry and a custom gradient must vary as their operands do. Casting ahead of them also
    has JAX sum the gradient of a replicated operand over the axes that it was cast to.

    Args:
      operands: arrays, or None, which passes through.
    """
    given = [jax.typeof(x).manual_axis_type.varying for x in operands if x is not None]
    axes = frozenset().union(*given)
    return [x if x is None else _cast(x, axes) for x in operands]


def varying(tree: tp.Any, axes: tp.Iterable[str]) -> tp.Any:
    """Makes every array of a pytree vary over the manual mesh axes given, besides its own."""
    return jax.tree.map(lambda x: _cast(x, frozenset(axes)), tree)


def _cast(x: jax.Array, axes: frozenset) -> jax.Array:
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

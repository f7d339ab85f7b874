"""Where a stored tensor's axes lie, as short strings that invert themselves.

A layout names the axes of an array in order: ``"E D (F J)"`` is a [E, D, 2F] tensor whose last
axis runs over F with gate and up interleaved, ``"E D (J F)"`` the concatenated one. Axes:

    E experts, J branches (gate, up), D model width, F expert width, S shared width,
    N width between Nemotron-H's projections, where D is that for the experts
    R router outputs (E plus identity experts), L layers, T tensor-parallel shards

Two layouts of the same axes fix a permutation, and swapping them fixes its inverse.
"""

import functools
import math
import re
import typing as tp

PARAMETER_AXES: tp.Final[dict[str, str]] = {
    "router.kernel": "D R",
    "router.bias": "R",
    "router.correction_bias": "R",
    "router.per_expert_scale": "R",
    "experts.wi": "E J D F",
    "experts.wi_bias": "E J F",
    "experts.wo": "E F D",
    "experts.wo_bias": "E D",
    "latent.wi": "D N",
    "latent.wo": "N D",
    "shared.wi": "J D S",
    "shared.wo": "S D",
    "shared.gate": "D 1",
}

_TOKEN = re.compile(r"\(([^()]*)\)|(\w+)")


@functools.cache
def parse(axes: str) -> tuple[tuple[str, ...], ...]:
    """Splits ``"E D (F J)"`` into ``(("E",), ("D",), ("F", "J"))``.

    Raises:
      ValueError: the string is not a layout, or names an axis twice.
    """
    groups = tuple(
        tuple(match.group(1).split()) if match.group(1) is not None else (match.group(2),)
        for match in _TOKEN.finditer(axes)
    )
    names = [name for group in groups for name in group if name != "1"]
    if len(set(names)) != len(names) or _TOKEN.sub("", axes).strip():
        raise ValueError(f"layout {axes!r} is malformed or names an axis twice")
    return groups


def shape_of(axes: str, sizes: tp.Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array that lies in this layout, given each axis' size."""
    return tuple(math.prod(1 if a == "1" else sizes[a] for a in group) for group in parse(axes))


def rearrange(x: tp.Any, source: str, target: str, sizes: tp.Mapping[str, int]) -> tp.Any:
    """Moves an array from one layout to another; with the two swapped, back again.

    Args:
      x: a NumPy or JAX array in layout ``source``. NumPy gives a view wherever one exists.
      source: its layout.
      target: the layout wanted; both name the same axes.
      sizes: the size of each axis.

    Raises:
      ValueError: the layouts name different axes, or x does not have the shape of ``source``.
    """
    expected = shape_of(source, sizes)
    if tuple(x.shape) != expected:
        raise ValueError(f"layout {source!r} has shape {expected}, got {tuple(x.shape)}")
    atoms = [name for group in parse(source) for name in group if name != "1"]
    wanted = [name for group in parse(target) for name in group if name != "1"]
    if sorted(atoms) != sorted(wanted):
        raise ValueError(f"layouts {source!r} and {target!r} name different axes")
    x = x.reshape([sizes[name] for name in atoms])
    x = x.transpose([atoms.index(name) for name in wanted])
    return x.reshape(shape_of(target, sizes))

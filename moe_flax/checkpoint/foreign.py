"""The parameter layouts of other libraries, there and back, as arrays at hand.

    mslk             MSLK MetaShuffling: router_DE, moe_w_in_eDF, moe_w_swiglu_eDF, moe_w_out_eFD,
                     w_in_shared_FD, w_swiglu_FD, w_out_shared_DF
    meta_llama4      Meta's Llama 4: the same, experts flattened: moe_w_in_eD_F, ...
    tpu_inference    tpu-inference's fused kernel: w1 [E, 2, D, F], w2 [E, F, D], gate [D, E]
    tpu_inference_w13  its grouped products: w13 [E, D, 2F], shard-interleaved for tensor
                     parallelism (``shards``), w2 [E, F, D]
    maxtext          MaxText: gate.kernel, wi_0, wi_1, wo; ``layers`` of them scanned, the second
                     axis of all: [E, L, ...], the router's [D, L, E] and [E, L], [D, L, S]
    gpt_oss          OpenAI's names: gate.weight, mlp1_weight [E, 2F, D] interleaved, mlp2_weight

Gate comes first in every pair of names.
"""

import re
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.layouts import PARAMETER_AXES, parse, rearrange
from moe_flax.checkpoint.mapping import axis_sizes, parameter_shapes
from moe_flax.checkpoint.schema import Entry
from moe_flax.config import MoEConfig

_MSLK_SHARED = (
    Entry("shared.wi", "{J}", "S D", ("w_in_shared_FD", "w_swiglu_FD")),
    Entry("shared.wo", "w_out_shared_DF", "D S"),
)
# An axis F is split into T shards of what remains, written T F here and in our own layout.
LAYOUTS: tp.Final[tp.Mapping[str, tuple[Entry, ...]]] = types.MappingProxyType(
    {
        "mslk": (
            Entry("router.kernel", "router_DE", "D R"),
            Entry("experts.wi", "{J}", "E D F", ("moe_w_in_eDF", "moe_w_swiglu_eDF")),
            Entry("experts.wo", "moe_w_out_eFD", "E F D"),
            *_MSLK_SHARED,
        ),
        "meta_llama4": (
            Entry("router.kernel", "router_DE", "D R"),
            Entry("experts.wi", "{J}", "(E D) F", ("moe_w_in_eD_F", "moe_w_swiglu_eD_F")),
            Entry("experts.wo", "moe_w_out_eF_D", "(E F) D"),
            *_MSLK_SHARED,
        ),
        "tpu_inference": (
            Entry("router.kernel", "gate", "D R"),
            Entry("experts.wi", "w1", "E J D F"),
            Entry("experts.wi_bias", "b1", "E J F"),
            Entry("experts.wo", "w2", "E F D"),
            Entry("experts.wo_bias", "b2", "E D"),
        ),
        "tpu_inference_w13": (
            Entry("router.kernel", "gate", "D R"),
            Entry("experts.wi", "w13", "E D (T J F)"),
            Entry("experts.wi_bias", "w13_bias", "E (T J F)"),
            Entry("experts.wo", "w2", "E F D"),
            Entry("experts.wo_bias", "w2_bias", "E D"),
        ),
        "maxtext": (
            Entry("router.kernel", "gate.kernel", "D R"),
            # One name for two things: a router has one of them.
            Entry("router.bias", "gate.bias", "R"),
            Entry("router.correction_bias", "gate.bias", "R"),
            Entry("experts.wi", "{J}", "E D F", ("wi_0", "wi_1")),
            Entry("experts.wi_bias", "{J}_bias", "E F", ("wi_0", "wi_1")),
            Entry("experts.wo", "wo", "E F D"),
            Entry("experts.wo_bias", "wo_bias", "E D"),
            Entry("shared.wi", "shared_experts.{J}.kernel", "D S", ("wi_0", "wi_1")),
            Entry("shared.wo", "shared_experts.wo.kernel", "S D"),
        ),
        "gpt_oss": (
            Entry("router.kernel", "gate.weight", "R D"),
            Entry("router.bias", "gate.bias", "R"),
            Entry("experts.wi", "mlp1_weight", "E (F J) D"),
            Entry("experts.wi_bias", "mlp1_bias", "E (F J)"),
            Entry("experts.wo", "mlp2_weight", "E D F"),
            Entry("experts.wo_bias", "mlp2_bias", "E D"),
        ),
    }
)


_GROUPS: tp.Final = re.compile(r"\([^()]*\)|\w+")


def _layout(name: str) -> dict[str, Entry]:
    if name not in LAYOUTS:
        raise fault(f"layout {name!r} is not known; known: {', '.join(LAYOUTS)}")
    return {entry.parameter: entry for entry in LAYOUTS[name]}


def _axes(entry: Entry, layers: int | None) -> tuple[str, str]:
    """Stored and own axes of one tensor of an entry; scanned layers are the second axis."""
    ours = [a for group in parse(PARAMETER_AXES[entry.parameter]) for a in group]
    if "{J}" in (entry.key or ""):
        ours.remove("J")
    stored = entry.axes
    if " T " in stored.replace("(", " "):
        ours[ours.index("F")] = "(T F)"
    if layers is not None:
        first, *others = _GROUPS.findall(stored)
        stored = " ".join([first, "L", *others])
        ours.insert(0, "L")
    return stored, " ".join(ours)


def _sizes(config: MoEConfig, parameter: str, shards: int, layers: int | None) -> dict[str, int]:
    sizes = axis_sizes(config, parameter)
    if sizes["F"] % shards:
        raise fault(f"width {sizes['F']} of an expert does not divide into {shards} shards")
    return sizes | {"T": shards, "L": layers or 1}


def to_layout(
    parameters: tp.Mapping[str, tp.Any] | tp.Sequence[tp.Mapping[str, tp.Any]],
    config: MoEConfig,
    name: str,
    *,
    shards: int = 1,
) -> dict[str, tp.Any]:
    """Gives a layer's parameters the names and layouts of another library.

    Args:
      parameters: arrays by their names here, as `load_parameters` gives them; a sequence of
        layers is scanned (MaxText).
      config: the layer's configuration.
      name: one of ``LAYOUTS``.
      shards: tensor-parallel shards of "tpu_inference_w13": gate and up alternate in each.

    Raises:
      CheckpointError: the layout is not known or has no place for a parameter.
    """
    entries = _layout(name)
    layers = None
    if not isinstance(parameters, tp.Mapping):
        layers = len(parameters)
        stack = np.stack if isinstance(parameters[0]["experts.wi"], np.ndarray) else jnp.stack
        parameters = {key: stack([p[key] for p in parameters]) for key in parameters[0]}
    lacking = sorted(set(parameters) - set(entries))
    if lacking:
        raise fault(f"layout {name} has no place for {lacking}")
    found: dict[str, tp.Any] = {}
    for parameter, value in parameters.items():
        entry = entries[parameter]
        sizes = _sizes(config, parameter, shards, layers)
        stored, ours = _axes(entry, layers)
        if "T" in parse_atoms(stored):
            sizes["F"] //= shards
        axis = PARAMETER_AXES[parameter].split().index("J") + bool(layers) if entry.branches else 0
        for branch, label in enumerate(entry.branches[-sizes["J"] :] or ("",)):
            part = _take(value, branch, axis) if entry.branches else value
            key = str(entry.key).replace("{J}", label)
            if key in found:
                raise fault(f"layout {name} would hold two parameters here", tensor=key)
            found[key] = rearrange(part, ours, stored, sizes)
    return found


def from_layout(
    tensors: tp.Mapping[str, tp.Any],
    config: MoEConfig,
    name: str,
    *,
    shards: int = 1,
    layers: int | None = None,
) -> tp.Any:
    """The inverse of `to_layout`: a layer's parameters, or a list of ``layers`` of them.

    Raises:
      CheckpointError: the layout is not known, or a tensor is missing, left over, or has another
        shape.
    """
    entries = _layout(name)
    found: dict[str, tp.Any] = {}
    used: set[str] = set()
    for parameter in parameter_shapes(config):
        if parameter not in entries:
            raise fault(f"layout {name} has no place for {parameter!r}")
        entry = entries[parameter]
        sizes = _sizes(config, parameter, shards, layers)
        stored, ours = _axes(entry, layers)
        if "T" in parse_atoms(stored):
            sizes["F"] //= shards
        parts = []
        for label in entry.branches[-sizes["J"] :] or ("",):
            key = str(entry.key).replace("{J}", label)
            if key not in tensors:
                raise fault("is missing", tensor=key)
            if key in used:
                raise fault(f"layout {name} would hold two parameters here", tensor=key)
            used.add(key)
            try:
                parts.append(rearrange(tensors[key], stored, ours, sizes))
            except ValueError as problem:
                raise fault(str(problem), tensor=key) from None
        axis = PARAMETER_AXES[parameter].split().index("J") + bool(layers) if entry.branches else 0
        stack = jnp.stack if isinstance(parts[0], jax.Array) else np.stack
        found[parameter] = stack(parts, axis) if entry.branches else parts[0]
    extra = sorted(set(tensors) - used)
    if extra:
        raise fault(f"belongs to no parameter of layout {name}", tensor=extra[0])
    if layers is None:
        return found
    return [{key: value[i] for key, value in found.items()} for i in range(layers)]


def parse_atoms(axes: str) -> list[str]:
    """The axes of a layout, flat."""
    return [atom for group in parse(axes) for atom in group]


def _take(value: tp.Any, index: int, axis: int) -> tp.Any:
    return value[(slice(None),) * axis + (index,)]

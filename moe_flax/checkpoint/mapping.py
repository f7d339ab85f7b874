"""Between parameters and stored tensors: which keys hold a parameter, and in which order."""

import dataclasses
import functools
import itertools
import typing as tp

import numpy as np

from moe_flax.activations import resolve_activation
from moe_flax.checkpoint.layouts import PARAMETER_AXES, parse, rearrange, shape_of
from moe_flax.checkpoint.schema import Entry
from moe_flax.config import MoEConfig

Tensors: tp.TypeAlias = tp.Mapping[str, tp.Any]
Index: tp.TypeAlias = tuple[slice, ...]


def axis_sizes(config: MoEConfig, parameter: str) -> dict[str, int]:
    """The size of each layout axis of a parameter."""
    shared = config.shared
    activation = config.activation
    if parameter.startswith("shared.") and shared and shared.activation is not None:
        activation = shared.activation
    return {
        "E": config.num_experts,
        "R": config.num_experts + config.router.num_identity_experts,
        "J": 2 if resolve_activation(activation).gated else 1,
        "D": config.expert_features if parameter.startswith("experts.") else config.features,
        "N": config.expert_features,
        "F": config.hidden_features,
        "S": shared.hidden_features if shared else 0,
    }


def parameter_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer with this configuration, and their shapes."""
    router, shared = config.router, config.shared
    present = {
        "router.kernel": True,
        "router.bias": router.logit_bias,
        "router.correction_bias": router.correction_bias,
        "router.per_expert_scale": router.per_expert_scale,
        "experts.wi": True,
        "experts.wi_bias": config.use_bias,
        "experts.wo": True,
        "experts.wo_bias": config.use_bias,
        "latent.wi": config.latent_features is not None,
        "latent.wo": config.latent_features is not None,
        "shared.wi": shared is not None,
        "shared.wo": shared is not None,
        "shared.gate": shared is not None and shared.combine == "gated",
    }
    return {
        name: shape_of(PARAMETER_AXES[name], axis_sizes(config, name))
        for name, there in present.items()
        if there
    }


def _without(axes: str, dropped: tp.Collection[str]) -> str:
    """A layout less some of its axes."""
    groups = [[axis for axis in group if axis not in dropped] for group in parse(axes)]
    return " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in groups if g)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One entry bound to one layer: its keys, and how blocks of the parameter lie under them.

    A block is the parameter at one expert (where it has experts) and one branch (where each has
    a tensor of its own): what is read or written at a time.

    Args:
      entry: the table's entry.
      prefix: the layer's key prefix.
      sizes: see `axis_sizes`.
    """

    entry: Entry
    prefix: str
    sizes: tp.Mapping[str, int]

    @property
    def axes(self) -> str:
        """The parameter's own layout."""
        return PARAMETER_AXES[self.entry.parameter]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return shape_of(self.axes, self.sizes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each stored tensor."""
        return shape_of(self.entry.axes, self.sizes)

    @functools.cached_property
    def by_expert(self) -> bool:
        """Whether blocks are single experts."""
        return self.axes.startswith("E")

    @functools.cached_property
    def by_branch(self) -> bool:
        """Whether gate and up are stored apart."""
        return "{J}" in (self.entry.key or "")

    @property
    def one_for_all_experts(self) -> bool:
        """Whether one stored value stands for all experts."""
        stored = [axis for group in parse(self.entry.axes) for axis in group]
        return self.by_expert and "{E}" not in (self.entry.key or "") and "E" not in stored

    @functools.cached_property
    def keys(self) -> dict[str, tuple[int, int]]:
        """Every key of the entry and its (expert, branch), experts in numeric order."""
        template = self.entry.key
        if template is None:
            return {}
        experts = range(self.sizes["E"]) if "{E}" in template else (0,)
        branches = range(self.sizes["J"]) if self.by_branch else (0,)
        return {self.key(e, j): (e, j) for e, j in itertools.product(experts, branches)}

    def key(self, expert: int, branch: int) -> str:
        """The key that holds a block."""
        names = self.entry.branches[-self.sizes["J"] :]  # without a gate: the last, up, alone
        key = (self.entry.key or "").replace("{E}", str(expert))
        return self.prefix + (key.replace("{J}", names[branch]) if self.by_branch else key)

    @functools.cached_property
    def block_axes(self) -> tuple[str, str]:
        """The layouts of one block: stored, and ours."""
        dropped = ("E",) * self.by_expert + ("J",) * self.by_branch
        return _without(self.entry.axes, dropped), _without(self.axes, dropped)

    @functools.cached_property
    def rows_by_expert(self) -> int:
        """Leading rows of a stored tensor that make one expert; 0 where it holds only one."""
        if self.by_expert and parse(self.entry.axes)[0][0] == "E":
            return self.stored_shape[0] // self.sizes["E"]
        return 0

    def block(self, tensors: Tensors, expert: int, branch: int) -> np.ndarray:
        """One block in our layout; a view where the tensor is memory-mapped."""
        stored, ours = self.block_axes
        if self.entry.key is None:
            return np.broadcast_to(np.float32(0), shape_of(ours, self.sizes))
        tensor = tensors[self.key(expert, branch)]
        if self.rows_by_expert:
            rows = self.rows_by_expert
            tensor = tensor[expert * rows : (expert + 1) * rows]
            tensor = tensor.reshape(shape_of(stored, self.sizes))
        return rearrange(np.asarray(tensor), stored, ours, self.sizes)


class Parameter(tp.Protocol):
    """A parameter that gives any part of itself when asked."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read_into(self, out: np.ndarray, index: Index) -> None:
        """Copies the part at ``index`` into ``out``, cast to its dtype."""
        ...


def read(parameter: Parameter, index: Index | None = None, dtype: tp.Any = None) -> np.ndarray:
    """Returns a part of a parameter, all of it by default, as a new array."""
    index = tuple(
        slice(*s.indices(n)[:2])
        for s, n in zip(
            index or (slice(None),) * len(parameter.shape), parameter.shape, strict=True
        )
    )
    out = np.empty([s.stop - s.start for s in index], dtype or parameter.dtype)
    parameter.read_into(out, index)
    return out


class StoredParameter:
    """A parameter that lies in stored tensors, read block by block.

    Args:
      binding: where it lies.
      tensors: the tensors by name: arrays, or anything with shape, dtype and slices of rows.
    """

    def __init__(self, binding: Binding, tensors: Tensors):
        self.binding, self.tensors, self.shape = binding, tensors, binding.shape
        dtypes = {np.dtype(tensors[key].dtype) for key in binding.keys}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def read_into(self, out: np.ndarray, index: Index) -> None:
        binding = self.binding
        lead = binding.by_expert + binding.by_branch
        inner = index[lead:]
        starts = [s.start for s in index[:lead]]
        for place in itertools.product(*(range(s.start, s.stop) for s in index[:lead])):
            expert = place[0] if binding.by_expert else 0
            branch = place[-1] if binding.by_branch else 0
            block = binding.block(self.tensors, expert, branch)
            _copy(out[tuple(p - s for p, s in zip(place, starts, strict=True))], block[inner])


def _copy(out: np.ndarray, block: np.ndarray) -> None:
    """Copies a block; a large turned matrix in pieces, which takes a third of the time."""
    if out.ndim > 2:  # a matrix at a time
        for ours, theirs in zip(out, block, strict=True):
            _copy(ours, theirs)
        return
    if out.ndim != 2 or out.size < 1 << 16 or out.dtype != block.dtype or out.itemsize > 4:
        out[...] = block
        return
    bits = np.dtype(f"u{out.itemsize}")  # plain integers move faster than bfloat16
    out, block = out.view(bits), block.view(bits)
    if (out.strides[0] > out.strides[1]) == (block.strides[0] > block.strides[1]):
        out[...] = block
        return
    if out.strides[0] < out.strides[1]:
        out, block = out.T, block.T
    packed = 8 // out.itemsize
    if block.strides[0] != block.itemsize or block.shape[0] % packed:
        for i, j in itertools.product(range(0, out.shape[0], 512), range(0, out.shape[1], 8)):
            out[i : i + 512, j : j + 8] = block[i : i + 512, j : j + 8]
        return
    wide = block.T.view(np.uint64).T  # [rows / packed, columns]: turned first, then taken apart
    pieces = out.reshape(wide.shape[0], packed, wide.shape[1])
    for i in range(0, wide.shape[0], 512):
        rows = wide[i : i + 512]
        turned = np.empty(rows.shape, np.uint64)
        for j in range(0, rows.shape[1], 8):
            turned[:, j : j + 8] = rows[:, j : j + 8]
        parts = turned.view(bits).reshape(*rows.shape, packed)
        for k in range(packed):
            pieces[i : i + 512, k] = parts[..., k]


class ArrayParameter:
    """A parameter that is an array already."""

    def __init__(self, array: tp.Any):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def read_into(self, out: np.ndarray, index: Index) -> None:
        out[...] = self.array[index]


class _Turned:
    """A parameter with its last two axes swapped."""

    def __init__(self, parameter: Parameter):
        self.parameter, self.dtype = parameter, parameter.dtype
        self.shape = (*parameter.shape[:-2], parameter.shape[-1], parameter.shape[-2])

    def read_into(self, out: np.ndarray, index: Index) -> None:
        *lead, rows, columns = index
        self.parameter.read_into(out.swapaxes(-1, -2), (*lead, columns, rows))


def turned(parameter: Parameter) -> Parameter:
    """A parameter with its last two axes swapped."""
    return _Turned(parameter)


def stored_chunks(
    binding: Binding, key: str, parameter: Parameter, dtype: np.dtype
) -> tp.Iterator[np.ndarray]:
    """Yields a stored tensor's data in order, an expert at a time, as contiguous arrays."""
    expert, branch = binding.keys[key]
    stored, ours = binding.block_axes
    experts = range(binding.sizes["E"]) if binding.rows_by_expert else (expert,)
    for e in experts:
        lead = (e,) * binding.by_expert + (branch,) * binding.by_branch
        out = np.empty(shape_of(stored, binding.sizes), dtype)
        view = rearrange(out, stored, ours, binding.sizes)
        view = view[(None,) * len(lead)]
        rest = tuple(slice(0, n) for n in binding.shape[len(lead) :])
        parameter.read_into(view, tuple(slice(i, i + 1) for i in lead) + rest)
        yield out

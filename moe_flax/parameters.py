"""How a layer's parameters are made: initialised a matrix at a time, placed where they live."""

import math
import types
import typing as tp

import jax
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.sharding import NamedSharding

from moe_flax import sharding

NO_METADATA: tp.Mapping[str, tp.Any] = types.MappingProxyType({})
_SHARDING_KEYS = frozenset({"out_sharding", "sharding", "sharding_names"})


class CorrectionBias(nnx.Variable):
    """A bias on the choice of experts: no Param, so no optimizer and no gradient touches it."""


class ParameterMaker:
    """Makes the parameters of one layer.

    Args:
      mesh: where they live, or None.
      rules: logical axes to mesh axes.
      rngs: keys come from its "params" stream.
    """

    def __init__(
        self, mesh: sharding.AnyMesh | None, rules: sharding.Rules | None, rngs: nnx.Rngs
    ):
        self._axes = sharding.resolve_axes(mesh, rules) if mesh is not None else None
        self._rules = rules
        self._rngs = rngs

    def __call__(
        self,
        name: str,
        init: Initializer,
        shape: tuple[int, ...],
        dtype: Dtype,
        metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
        *,
        batch_axes: int = 0,
        variable: type[nnx.Variable] = nnx.Param,
    ) -> tp.Any:
        """Makes one parameter.

        Args:
          name: a key of ``sharding.LOGICAL_AXES``.
          init: an initializer; it sees the shape without its leading ``batch_axes``, so experts
            and branches never count into the fan-in.
          shape: the whole shape.
          dtype: of the parameter.
          metadata: the caller's; a sharding in it, or in what ``nnx.with_partitioning`` puts on
            the initializer, replaces ours.
          batch_axes: leading axes over which ``init`` is repeated with keys of their own.
          variable: the kind of Variable.
        """
        boxed: dict[str, tp.Any] = {}

        def one(key: jax.Array) -> jax.Array:
            value = init(key, shape[batch_axes:], dtype)
            if isinstance(value, nnx.VariableMetadata):
                boxed.update({k: v for k, v in value.metadata.items() if v is not None})
                return tp.cast(jax.Array, value.raw_value)
            return tp.cast(jax.Array, value)

        def whole(key: jax.Array) -> jax.Array:
            if not batch_axes:
                return one(key)
            keys = jax.random.split(key, math.prod(shape[:batch_axes]))
            return jax.vmap(one)(keys).reshape(shape)

        key = self._rngs.params()
        jax.eval_shape(whole, key)  # fills `boxed`
        metadata = {**boxed, **metadata}
        if _SHARDING_KEYS & set(metadata):
            return variable(whole(key), **metadata)
        if self._axes is None:  # logical names: a mesh may come later
            metadata["out_sharding"] = sharding.LOGICAL_AXES[name]
            metadata["sharding_rules"] = sharding.flax_rules(self._rules)
            placement = None
        else:
            spec = self._axes.spec(name, shape)
            metadata["out_sharding"] = tuple(spec)
            placement = NamedSharding(self._axes.mesh, spec)
        value = sharding.place(whole, key, placement)
        return variable(value, eager_sharding=False, **metadata)

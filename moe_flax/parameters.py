"""How a layer's parameters are made: initialised a matrix at a time, placed where they live."""

import math
import types
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.sharding import NamedSharding

from moe_flax import sharding
from moe_flax.activations import resolve_activation
from moe_flax.config import MoEConfig

NO_METADATA: tp.Mapping[str, tp.Any] = types.MappingProxyType({})
_SHARDING_KEYS = frozenset({"out_sharding", "sharding", "sharding_names"})


class CorrectionBias(nnx.Variable):
    """A bias on the choice of experts: no Param, so no optimizer and no gradient touches it."""


def parameter_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """The parameters that a layer has, by the names of ``sharding.LOGICAL_AXES``, and their shapes.

    ``router.correction_bias`` among them, although it is no Param.
    """
    e, d, f = config.num_experts, config.features, config.hidden_features
    seen = config.expert_features
    columns = e + config.router.num_identity_experts
    branches = 2 if resolve_activation(config.activation).gated else 1
    shapes: dict[str, tuple[int, ...]] = {"router.kernel": (d, columns)}
    if config.router.logit_bias:
        shapes["router.bias"] = (columns,)
    if config.router.per_expert_scale:
        shapes["router.per_expert_scale"] = (columns,)
    if config.router.correction_bias:
        shapes["router.correction_bias"] = (columns,)
    if config.latent_features is not None:
        shapes["latent.wi"], shapes["latent.wo"] = (d, seen), (seen, d)
    shapes["experts.wi"] = (e, branches, seen, f)
    shapes["experts.wo"] = (e, f, seen)
    if config.use_bias:
        shapes["experts.wi_bias"] = (e, branches, f)
        shapes["experts.wo_bias"] = (e, seen)
    if config.shared is not None:
        s = config.shared.hidden_features
        branches = (
            2 if resolve_activation(config.shared.activation or config.activation).gated else 1
        )
        shapes["shared.wi"] = (branches, d, s)
        shapes["shared.wo"] = (s, d)
        if config.shared.combine == "gated":
            shapes["shared.gate"] = (d, 1)
    return shapes


class ParameterMaker:
    """Makes the parameters of one layer.

    Args:
      config: the layer.
      param_dtype: of all but the router's parameters, which are float32.
      mesh: where they live, or None.
      rules: logical axes to mesh axes.
      rngs: keys come from its "params" stream.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        param_dtype: Dtype,
        mesh: sharding.AnyMesh | None,
        rules: sharding.Rules | None,
        rngs: nnx.Rngs,
    ):
        self._shapes = parameter_shapes(config)
        self._param_dtype = param_dtype
        self._axes = sharding.resolve_axes(mesh, rules) if mesh is not None else None
        self._rules = rules
        self._rngs = rngs

    def __call__(
        self,
        name: str,
        init: Initializer,
        metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
        *,
        rank: int = 2,
        variable: type[nnx.Variable] = nnx.Param,
    ) -> tp.Any:
        """Makes one parameter; ``nnx.data(None)`` if the layer has none of that name.

        Args:
          name: a key of ``sharding.LOGICAL_AXES``.
          init: an initializer. It sees the last ``rank`` axes, one expert's and branch's matrix
            or vector, so that E never counts into the fan-in; each has a key of its own.
          metadata: the caller's; a sharding in it, or in what ``nnx.with_partitioning`` puts on
            the initializer, replaces ours.
          rank: 2 for a matrix, 1 for a vector.
          variable: the kind of Variable.
        """
        if name not in self._shapes:
            return nnx.data(None)
        shape = self._shapes[name]
        dtype = jnp.float32 if name.startswith("router.") else self._param_dtype
        lead, own = shape[:-rank], shape[-rank:]
        boxed: dict[str, tp.Any] = {}

        def one(key: jax.Array) -> jax.Array:
            value = init(key, own, dtype)
            if isinstance(value, nnx.VariableMetadata):
                boxed.update({k: v for k, v in value.metadata.items() if v is not None})
                return tp.cast(jax.Array, value.raw_value)
            return tp.cast(jax.Array, value)

        def whole(key: jax.Array) -> jax.Array:
            if not lead:
                return one(key)
            return jax.vmap(one)(jax.random.split(key, math.prod(lead))).reshape(shape)

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

"""The layer as Flax NNX modules: router, experts, shared experts, and the MoE that joins them."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Bool, Float

from moe_flax import losses, sharding
from moe_flax.activations import Activation
from moe_flax.config import MoEConfig, RouterConfig, SharedConfig
from moe_flax.forward import Forward, router_logits
from moe_flax.kernels.backend import check_backend, resolve_backend
from moe_flax.losses import MoEAux
from moe_flax.parallel import Fused, check_strategy, choose_fused
from moe_flax.parallel.mesh import DeviceAxes, Parameters, over_mesh
from moe_flax.parameters import (
    NO_METADATA,
    CorrectionBias,
    ParameterMaker,
    parameter_shapes,
)
from moe_flax.quantized_weights import (
    QuantizedWeight,
    WeightScale,
    check_quantized,
    check_scales_split,
    is_packed,
    quantized_logical_axes,
    stored_shape,
)

default_kernel_init = nnx.initializers.lecun_normal()
default_bias_init = nnx.initializers.zeros_init()


class Router(nnx.Module):
    """Scores every expert for every token, in float32 whatever the model's dtype.

    Attributes:
      kernel: [D, E]. bias, per_expert_scale: [E], or None. correction_bias: [E], or None; a
        ``CorrectionBias``, which is no Param.
    """

    kernel: nnx.Param[jax.Array]
    bias: nnx.Param[jax.Array] | None
    per_expert_scale: nnx.Param[jax.Array] | None
    correction_bias: CorrectionBias | None

    def __init__(self, make: ParameterMaker, kernel_init: Initializer, bias_init: Initializer):
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        self.kernel = make("router.kernel", kernel_init)
        self.bias = make("router.bias", bias_init, rank=1)
        self.per_expert_scale = make("router.per_expert_scale", ones, rank=1)
        self.correction_bias = make(
            "router.correction_bias", zeros, rank=1, variable=CorrectionBias
        )

    def __call__(self, inputs: Float[Array, "... D"]) -> Float[Array, "... E"]:
        """The logits, float32."""
        parameters = {"router.kernel": self.kernel[...]}
        if self.bias is not None:
            parameters["router.bias"] = self.bias[...]
        return router_logits(parameters, inputs)


class Experts(nnx.Module):
    """The routed experts' weights; gate and up have an axis of their own (0 and 1).

    Attributes:
      wi: [E, 2, D, F], or [E, 1, D, F] without a gate. wo: [E, F, D].
      wi_bias: [E, 2, F], or None. wo_bias: [E, D], or None.
      wi_scale, wo_scale: the scales of quantised weights, or None; see `hold_quantized`. Neither
        they nor quantised wi and wo are Params.
      transposed: static; wi lies as [E, 2, F, D] and wo as [E, D, F].
      logical: static; what `moe_flax.sharding.MeshAxes.logical` has to say of them.
    """

    wi: nnx.Param[jax.Array] | QuantizedWeight
    wi_bias: nnx.Param[jax.Array] | None
    wi_scale: WeightScale | None
    wo: nnx.Param[jax.Array] | QuantizedWeight
    wo_bias: nnx.Param[jax.Array] | None
    wo_scale: WeightScale | None

    def __init__(
        self,
        make: ParameterMaker,
        kernel_init: Initializer,
        bias_init: Initializer,
        kernel_metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
        bias_metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
    ):
        self.wi = make("experts.wi", kernel_init, kernel_metadata)
        self.wo = make("experts.wo", kernel_init, kernel_metadata)
        self.wi_bias = make("experts.wi_bias", bias_init, bias_metadata, rank=1)
        self.wo_bias = make("experts.wo_bias", bias_init, bias_metadata, rank=1)
        self.wi_scale: WeightScale | None = nnx.data(None)
        self.wo_scale: WeightScale | None = nnx.data(None)
        self.transposed = False
        self.logical: sharding.LogicalAxes = ()

    def hold_quantized(
        self,
        wi: Array,
        wo: Array,
        wi_scale: Array | None = None,
        wo_scale: Array | None = None,
        *,
        transposed: bool = False,
        metadata: tp.Mapping[str, tp.Mapping[str, tp.Any]] = NO_METADATA,
    ) -> None:
        """Puts quantised weights in the place of wi and wo.

        They are variables that are no Params: ``nnx.grad`` and optimizers pass them by.

        Args:
          wi, wo: values: floats of 8 bits, int8, or two floats of 4 bits in a uint8, along the
            last axis and transposed only. One without scales stays a float Param.
          wi_scale, wo_scale: what `moe_flax.quantize.dequantize` takes with them; their first
            axis has all experts.
          transposed: wi is [E, J, F, D] and wo [E, D, F], scales alike.
          metadata: of the variables, by their names.

        Raises:
          ValueError: shapes that do not fit the layer or one another.
          TypeError: values that need scales have none.
        """
        given = {"wi": (wi, wi_scale), "wo": (wo, wo_scale)}
        held = {"wi": self.wi, "wo": self.wo}
        for name, (values, scales) in given.items():
            packed = self.transposed and is_packed(held[name])
            whole = stored_shape(held[name].shape, transposed=self.transposed)
            whole = (*whole[:-2], 2 * whole[-2], whole[-1]) if packed else whole
            check_quantized(f"experts.{name}", values, scales, whole, transposed=transposed)
        for name, (values, scales) in given.items():
            kind = nnx.Param if scales is None else QuantizedWeight
            for leaf, value, variable in (
                (name, values, kind),
                (f"{name}_scale", scales, WeightScale),
            ):
                boxed = metadata.get(leaf, NO_METADATA)
                if value is None:
                    setattr(self, leaf, nnx.data(None))
                else:
                    setattr(self, leaf, variable(value, eager_sharding=False, **boxed))
        self.transposed = transposed
        shapes = {f"experts.{n}": s.shape for n, (_, s) in given.items() if s is not None}
        self.logical = quantized_logical_axes(shapes, transposed=transposed)


class Latent(nnx.Module):
    """Projections of a token to the width that the routed experts see, and back.

    Attributes:
      wi: [D, L]. wo: [L, D].
    """

    wi: nnx.Param[jax.Array]
    wo: nnx.Param[jax.Array]

    def __init__(self, make: ParameterMaker, kernel_init: Initializer):
        self.wi = make("latent.wi", kernel_init)
        self.wo = make("latent.wo", kernel_init)


class SharedExperts(nnx.Module):
    """The shared experts' weights: one dense FFN that every token passes.

    Attributes:
      wi: [2, D, S], or [1, D, S] without a gate branch. wo: [S, D].
      gate: [D, 1], the token's own gate on the result, or None.
    """

    wi: nnx.Param[jax.Array]
    wo: nnx.Param[jax.Array]
    gate: nnx.Param[jax.Array] | None

    def __init__(self, make: ParameterMaker, kernel_init: Initializer):
        self.wi = make("shared.wi", kernel_init)
        self.wo = make("shared.wo", kernel_init)
        self.gate = make("shared.gate", kernel_init)


class MoE(nnx.Module):
    """A mixture-of-experts feed-forward layer.

    Example usage::

      >>> from flax import nnx
      >>> import jax, jax.numpy as jnp
      >>> import moe_flax

      >>> layer = moe_flax.MoE(16, 32, num_experts=8, num_experts_per_token=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 10, 16))).shape
      (4, 10, 16)
      >>> layer.experts.wi.shape, layer.experts.wo.shape
      ((8, 2, 16, 32), (8, 32, 16))

    Args:
      features: width D of the inputs and outputs.
      hidden_features: width F of an expert.
      num_experts: number of routed experts E.
      num_experts_per_token: experts K that each token goes to.
      router: how logits become choices and weights.
      shared: the shared experts, or None.
      activation: "silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss" or an ``Activation``.
      use_bias: whether the experts have biases (default: False).
      latent_features: width that the routed experts see, between two projections; None for D.
      dtype: the dtype of the computation (default: infer from input and params). The router
        computes in float32 always.
      param_dtype: the dtype passed to parameter initializers (default: float32). The router's
        parameters are float32 always.
      precision: numerical precision of the computation see ``jax.lax.Precision`` for details.
      kernel_init: initializer function for the weight matrices; it sees one expert's matrix.
      bias_init: initializer function for the biases.
      backend: what runs the experts' products: "auto", "reference", "cpu", "triton", "tpu" or
        "xla".
      expert_parallel: how tokens travel to their experts on a mesh: "auto", "none",
        "all_gather", "all_to_all", "fused" (one TPU kernel for exchange and experts, which "auto"
        takes on TPUs) or ``moe_flax.parallel.Fused`` with its options.
      mesh: the mesh that parameters and tokens are split over (default: the one in scope, see
        ``jax.set_mesh``, or none).
      rules: logical axes ("expert", "embed", "mlp", "tokens") to mesh axes, see
        ``moe_flax.sharding.DEFAULT_RULES``.
      rngs: rng key.
      kernel_metadata: Optional metadata dictionary to set when initializing the experts' weight
        matrices.
      bias_metadata: Optional metadata dictionary to set when initializing their biases.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        router: RouterConfig = RouterConfig(),  # noqa: B008 (frozen)
        shared: SharedConfig | None = None,
        activation: str | Activation = "silu",
        use_bias: bool = False,
        latent_features: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str = "auto",
        expert_parallel: str | Fused = "auto",
        mesh: sharding.AnyMesh | None = None,
        rules: sharding.Rules | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
        bias_metadata: tp.Mapping[str, tp.Any] = NO_METADATA,
    ):
        config = MoEConfig(
            features=features,
            hidden_features=hidden_features,
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            router=router,
            shared=shared,
            activation=activation,
            use_bias=use_bias,
            latent_features=latent_features,
        )
        self.config = config
        for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
            if given is not None and not jnp.issubdtype(given, jnp.floating):
                raise TypeError(f"{name} must be a floating dtype, got {given}")
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = check_backend(backend)
        self.expert_parallel = check_strategy(expert_parallel)
        self.mesh = mesh
        self.rules = tuple(sharding.normalize_rules(rules).items())  # hashable: static under jit

        make = ParameterMaker(
            config,
            param_dtype=param_dtype,
            mesh=sharding.active_mesh(mesh),
            rules=rules,
            rngs=rngs,
        )
        self.router = Router(make, kernel_init, bias_init)
        self.experts = Experts(make, kernel_init, bias_init, kernel_metadata, bias_metadata)
        self.latent: Latent | None = nnx.data(None)
        if latent_features is not None:
            self.latent = Latent(make, kernel_init)
        self.shared: SharedExperts | None = nnx.data(None)
        if shared is not None:
            self.shared = SharedExperts(make, kernel_init)

    @classmethod
    def from_config(cls, config: MoEConfig, **kwargs: tp.Any) -> "MoE":
        """A layer of the sizes, router and experts that ``config`` says.

        Args:
          config: such as ``MoEConfig.preset("mixtral-8x7b")`` or ``MoEConfig.from_hf(path)``.
          **kwargs: the constructor's remaining keywords: ``rngs``, ``mesh``, ``dtype``, ...
        """
        layer = cls(
            config.features,
            config.hidden_features,
            config.num_experts,
            config.num_experts_per_token,
            router=config.router,
            shared=config.shared,
            activation=config.activation,
            use_bias=config.use_bias,
            latent_features=config.latent_features,
            **kwargs,
        )
        layer.config = config
        return layer

    @tp.overload
    def __call__(
        self,
        inputs: Array,
        *,
        return_aux: tp.Literal[False] = False,
        mask: Array | None = None,
        router_inputs: Array | None = None,
    ) -> Array: ...
    @tp.overload
    def __call__(
        self,
        inputs: Array,
        *,
        return_aux: tp.Literal[True],
        mask: Array | None = None,
        router_inputs: Array | None = None,
    ) -> tuple[Array, MoEAux]: ...
    def __call__(
        self,
        inputs: Float[Array, "... D"],
        *,
        return_aux: bool = False,
        mask: Bool[Array, "..."] | None = None,
        router_inputs: Float[Array, "... D"] | None = None,
    ) -> Float[Array, "... D"] | tuple[Float[Array, "... D"], MoEAux]:
        """Sends every token to its experts.

        Args:
          inputs: [..., D], of any rank from 1 up and any floating dtype. Where the router has a
            capacity for each sequence, that is the axis before D; inside a caller's ``shard_map``
            it must be whole.
          return_aux: also return losses and load, summed over the whole mesh.
          mask: [...], False for tokens that only pad the batch: they give zeros from the routed
            experts, and count in no loss and no load.
          router_inputs: [..., D], what the router sees of each token where that is not what the
            experts see (Gemma 4 normalises the two apart); by default ``inputs``.

        Returns:
          [..., D], in ``dtype`` (or what inputs and parameters promote to); and a ``MoEAux``.

        Raises:
          ValueError: the last dimension is not D, the mask's shape is not ``inputs``' without it,
            or that of ``router_inputs`` is not ``inputs``'.
          TypeError: inputs or ``router_inputs`` are not of a floating dtype, or the mask is not
            bool.
        """
        inputs, mask = jnp.asarray(inputs), None if mask is None else jnp.asarray(mask)
        router_inputs = None if router_inputs is None else jnp.asarray(router_inputs)
        _check_inputs(inputs, mask, router_inputs, self.config.features)
        floats = [
            weight[...]
            for weight in (self.experts.wi, self.experts.wo)
            if not isinstance(weight, QuantizedWeight)
        ]
        dtype = self.dtype or jnp.result_type(inputs, *floats)
        rows, statistics = self._forward(inputs.astype(dtype), mask, router_inputs)
        if not return_aux:
            return rows
        return rows, losses.moe_aux(statistics)

    def update_correction_bias(
        self, tokens_per_expert: Float[Array, " E"], rate: float = 1e-3
    ) -> None:
        """Moves the correction bias towards an even load, in place (DeepSeek-V3, section 2.1.2).

        Under ``jax.jit`` writes in place are lost: return the layer from the function, use
        ``nnx.jit``, or keep the bias yourself with ``moe_flax.losses.update_correction_bias``.

        Args:
          tokens_per_expert: [E], of the whole batch: ``aux.tokens_per_expert``.
          rate: step of the bias.

        Raises:
          ValueError: the router has no correction bias, or the shape is wrong.
        """
        bias = self.router.correction_bias
        if bias is None:
            raise ValueError(
                "the router has no correction bias; RouterConfig(correction_bias=True)"
            )
        tokens_per_expert = jnp.asarray(tokens_per_expert)
        if tokens_per_expert.shape != (self.config.num_experts,):
            raise ValueError(
                f"tokens_per_expert must be of shape ({self.config.num_experts},), got"
                f" {tokens_per_expert.shape}"
            )
        bias[...] = losses.update_correction_bias(bias[...], tokens_per_expert, rate)

    def _forward(
        self,
        inputs: Float[Array, "... D"],
        mask: Bool[Array, "..."] | None,
        router_inputs: Float[Array, "... D"] | None,
    ) -> tuple[Float[Array, "... D"], losses.RoutingStatistics]:
        mesh = sharding.active_mesh(self.mesh)
        sharding.check_scope(mesh)
        axes = sharding.resolve_axes(mesh, self.rules) if mesh is not None else None
        experts = self.experts
        if axes is not None:
            axes = dataclasses.replace(axes, logical=experts.logical)
        by_sequence = self.config.router.capacity_scope == "sequence"
        forward = Forward(
            config=self.config,
            precision=self.precision,
            backend=resolve_backend(self.backend, sharding.mesh_platform(mesh)),
            expert_parallel=choose_fused(
                self.expert_parallel, axes, inputs.dtype, transposed=experts.transposed
            ),
            transposed=experts.transposed,
            sequence_length=inputs.shape[-2] if by_sequence and inputs.ndim > 1 else None,
        )
        parameters = self._parameters(inputs.dtype)
        if mask is None:
            mask = jnp.ones(inputs.shape[:-1], bool)
        if axes is None:
            tokens, flat_mask = inputs.reshape(-1, inputs.shape[-1]), mask.reshape(-1)
            seen = None if router_inputs is None else router_inputs.reshape(tokens.shape)
            rows, statistics = _on_one_device(forward, parameters, tokens, flat_mask, seen)
            return rows.reshape(inputs.shape), statistics
        shapes = parameter_shapes(self.config)
        for name, weight, scale in (
            ("experts.wi", experts.wi, experts.wi_scale),
            ("experts.wo", experts.wo, experts.wo_scale),
        ):
            packed = scale is not None and is_packed(weight)
            shapes[name] = stored_shape(shapes[name], transposed=experts.transposed, packed=packed)
            if scale is not None and not getattr(axes.mesh, "manual_axes", ()):
                check_scales_split(name, weight, scale, axes, transposed=experts.transposed)
        return over_mesh(forward, parameters, shapes, inputs, mask, axes, router_inputs)

    def _parameters(self, dtype: Dtype) -> Parameters:
        """All parameters by name; all but the router's and quantised ones in ``dtype``."""
        found = {}
        for name in (*parameter_shapes(self.config), "experts.wi_scale", "experts.wo_scale"):
            module, _, leaf = name.partition(".")
            variable = getattr(getattr(self, module), leaf)
            if variable is None:
                continue
            kept = module == "router" or isinstance(variable, QuantizedWeight | WeightScale)
            found[name] = variable[...] if kept else variable[...].astype(dtype)
        return found


@functools.partial(jax.jit, static_argnames="forward")
def _on_one_device(
    forward: Forward,
    parameters: Parameters,
    tokens: jax.Array,
    mask: jax.Array,
    router_tokens: jax.Array | None,
) -> tuple[jax.Array, losses.RoutingStatistics]:
    return forward(parameters, tokens, mask, router_tokens, DeviceAxes(), tokens.shape[0])


def _check_inputs(
    inputs: jax.Array, mask: jax.Array | None, router_inputs: jax.Array | None, features: int
) -> None:
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(f"inputs must be of a floating dtype, got {inputs.dtype}")
    if inputs.ndim < 1 or inputs.shape[-1] != features:
        raise ValueError(f"inputs must be [..., {features}], got shape {inputs.shape}")
    if router_inputs is not None and router_inputs.shape != inputs.shape:
        raise ValueError(
            f"router_inputs must be of the inputs' shape {inputs.shape}, got {router_inputs.shape}"
        )
    if router_inputs is not None and not jnp.issubdtype(router_inputs.dtype, jnp.floating):
        raise TypeError(f"router_inputs must be of a floating dtype, got {router_inputs.dtype}")
    if mask is not None and mask.shape != inputs.shape[:-1]:
        raise ValueError(f"mask must be of shape {inputs.shape[:-1]}, got {mask.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be of dtype bool, got {mask.dtype}")

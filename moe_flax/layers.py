"""The layer as Flax NNX modules: router, experts, shared experts, and the MoE that joins them."""

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
    """

    wi: nnx.Param[jax.Array]
    wi_bias: nnx.Param[jax.Array] | None
    wo: nnx.Param[jax.Array]
    wo_bias: nnx.Param[jax.Array] | None

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
          inputs: [..., D], of any rank from 1 up and any floating dtype.
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
        dtype = self.dtype or jnp.result_type(inputs, self.experts.wi[...], self.experts.wo[...])
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
        forward = Forward(
            config=self.config,
            precision=self.precision,
            backend=resolve_backend(self.backend, sharding.mesh_platform(mesh)),
            expert_parallel=choose_fused(self.expert_parallel, axes, inputs.dtype),
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
        return over_mesh(forward, parameters, shapes, inputs, mask, axes, router_inputs)

    def _parameters(self, dtype: Dtype) -> Parameters:
        """All parameters by name; all but the router's in the dtype to compute in."""
        found = {}
        for name in parameter_shapes(self.config):
            module, _, leaf = name.partition(".")
            value = getattr(getattr(self, module), leaf)[...]
            found[name] = value if module == "router" else value.astype(dtype)
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

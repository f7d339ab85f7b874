"""The way of a token on one device: router, routing, experts wherever they are, shared experts."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_flax import parallel
from moe_flax.activations import resolve_activation
from moe_flax.capacity import apply_capacity, tokens_an_expert_takes
from moe_flax.config import MoEConfig, SharedConfig
from moe_flax.experts import expert_ffn
from moe_flax.losses import RoutingStatistics, routing_statistics
from moe_flax.parallel.mesh import DeviceAxes, Parameters, gather_embed
from moe_flax.routing import Routing, renormalize_weights, route
from moe_flax.varying import varying


@dataclasses.dataclass(frozen=True)
class Forward:
    """A layer's computation on one device, as a value: equal layers share compiled code.

    Attributes:
      config: the layer.
      precision: of the products, see ``jax.lax.Precision``.
      backend: of the experts' products.
      expert_parallel: a strategy of ``moe_flax.parallel``, "auto" among the collective ones, or
        the fused kernel.
      transposed: whether the experts' weights lie transposed, see `moe_flax.expert_ffn`.
      sequence_length: tokens of each sequence; needed where capacity counts by sequence.
    """

    config: MoEConfig
    precision: tp.Any = None
    backend: str = "auto"
    expert_parallel: str | parallel.Fused = "auto"
    transposed: bool = False
    sequence_length: int | None = None

    @property
    def check_vma(self) -> bool:
        """Whether the enclosing ``shard_map`` may track varying types: Pallas for TPU cannot."""
        return not isinstance(self.expert_parallel, parallel.Fused)

    def __call__(
        self,
        parameters: Parameters,
        tokens: Float[Array, "t D"],
        mask: Bool[Array, " t"],
        router_tokens: Float[Array, "t D"] | None,
        axes: DeviceAxes,
        num_tokens: int,
    ) -> tuple[Float[Array, "t D"], RoutingStatistics]:
        """One device's tokens through the layer.

        Args:
          parameters: this device's share, by the names of ``sharding.LOGICAL_AXES``; router
            parameters in float32, the rest in the dtype to compute in.
          tokens: [t, D], in the dtype to compute in.
          mask: [t], False for tokens that pad the batch: they cost nothing and count nowhere.
          router_tokens: [t, D], what the router sees of them; None for ``tokens``.
          axes: the mesh axes that split parameters and tokens.
          num_tokens: tokens of all devices, padding not counted.

        Returns:
          [t, D], and the statistics summed over all devices that hold tokens.
        """
        config = self.config
        parameters = {name: gather_embed(name, value, axes) for name, value in parameters.items()}
        logits = router_logits(parameters, tokens if router_tokens is None else router_tokens)
        choices, statistics = route_tokens(
            parameters, logits, mask, axes, num_tokens, config, self.sequence_length
        )

        # Replicated parameters vary from here on as what they meet: gradients sum accordingly.
        tokens_in, routing, parameters = varying(
            (tokens, choices, parameters), (*axes.tokens, *axes.mlp)
        )
        seen = tokens_in
        if config.latent_features is not None:
            seen = jnp.dot(tokens_in, parameters["latent.wi"], precision=self.precision)
        rows = self._strategy(routing, axes)(
            self._feed_forward,
            *varying((seen, routing, _weights(parameters, axes)), axes.expert),
            axes=axes.expert,
        )
        if config.latent_features is not None:  # linear: parts of F may be summed after it
            rows = jnp.dot(rows, parameters["latent.wo"], precision=self.precision)
        if config.shared is not None:
            shared = shared_ffn(parameters, tokens_in, config, config.shared, self.precision)
            rows = 0.5 * (rows + shared) if config.shared.combine == "average" else rows + shared
        if axes.mlp:
            rows = jax.lax.psum(rows.astype(jnp.float32), axes.mlp)
        rows = rows.astype(tokens.dtype)
        if config.router.num_identity_experts:
            rows = rows + _identity(tokens, choices, config)
        return rows, statistics

    def _strategy(self, routing: Routing, axes: DeviceAxes) -> parallel.Strategy:
        if not axes.expert:
            return parallel.none
        split = set(axes.expert) & set(axes.tokens)
        if not split:
            return parallel.replicated
        if split != set(axes.expert):
            raise ValueError(
                f"tokens are split over mesh axes {axes.tokens} and experts over {axes.expert}: all"
                " of the experts' axes must split the tokens too, or none of them"
            )
        if isinstance(self.expert_parallel, parallel.Fused):
            return self.expert_parallel.strategy(self.config.activation, self.backend)
        num_tokens, k = routing.expert_ids.shape
        peers = jax.lax.axis_size(axes.expert)
        return parallel.choose_strategy(
            self.expert_parallel, num_tokens=num_tokens, k=k, peers=peers
        )

    def _feed_forward(
        self, tokens: Float[Array, "t D"], routing: Routing, weights: parallel.ExpertWeights
    ) -> Float[Array, "t D"]:
        return expert_ffn(
            tokens,
            weights.wi,
            weights.wo,
            routing,
            activation=self.config.activation,
            wi_bias=weights.wi_bias,
            wo_bias=weights.wo_bias,
            wi_scale=weights.wi_scale,
            wo_scale=weights.wo_scale,
            transpose_weights=self.transposed,
            precision=self.precision,
            backend=self.backend,
        )


def _weights(parameters: Parameters, axes: DeviceAxes) -> parallel.ExpertWeights:
    wo_bias = parameters.get("experts.wo_bias")
    if wo_bias is not None and axes.mlp:  # of the devices that share F, one adds the bias
        wo_bias = jnp.where(jax.lax.axis_index(axes.mlp) == 0, wo_bias, 0)
    return parallel.ExpertWeights(
        wi=parameters["experts.wi"],
        wo=parameters["experts.wo"],
        wi_bias=parameters.get("experts.wi_bias"),
        wo_bias=wo_bias,
        wi_scale=parameters.get("experts.wi_scale"),
        wo_scale=parameters.get("experts.wo_scale"),
    )


def router_logits(parameters: Parameters, tokens: Float[Array, "t D"]) -> Float[Array, "t E"]:
    """The router's product, in float32 at the highest precision."""
    logits = jnp.dot(
        tokens.astype(jnp.float32),
        parameters["router.kernel"].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    bias = parameters.get("router.bias")
    return logits if bias is None else logits + bias.astype(jnp.float32)


def shared_ffn(
    parameters: Parameters,
    tokens: Float[Array, "t D"],
    config: MoEConfig,
    shared: SharedConfig,
    precision: tp.Any = None,
) -> Float[Array, "t D"]:
    """The shared experts, gated by each token where the config says so."""
    activation = resolve_activation(shared.activation or config.activation)
    wi, wo = parameters["shared.wi"], parameters["shared.wo"]
    hidden = activation(jnp.einsum("td,jds->tjs", tokens, wi, precision=precision))
    rows = jnp.einsum("ts,sd->td", hidden, wo, precision=precision)
    if shared.combine != "gated":
        return rows
    gate = jnp.dot(
        tokens.astype(jnp.float32),
        parameters["shared.gate"].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return (rows * jax.nn.sigmoid(gate)).astype(rows.dtype)


def route_tokens(
    parameters: Parameters,
    logits: Float[Array, "t E"],
    mask: Bool[Array, " t"],
    axes: DeviceAxes,
    num_tokens: int,
    config: MoEConfig,
    sequence_length: int | None = None,
) -> tuple[Routing, RoutingStatistics]:
    """Routes this device's tokens within capacity, and counts what all devices' tokens chose.

    Args are those of `Forward`; ``logits`` are this device's.
    """
    router, k = config.router, config.num_experts_per_token
    counted = sequence_length if router.capacity_scope == "sequence" else num_tokens
    capacity = None
    if counted is not None:
        capacity = tokens_an_expert_takes(router, counted, config.num_experts, k)
    after = capacity is not None and router.capacity_renormalize
    chosen = route(
        logits,
        dataclasses.replace(router, renormalize=False, capacity_renormalize=False, scale=1.0)
        if after
        else router,
        k,
        correction_bias=parameters.get("router.correction_bias"),
        per_expert_scale=parameters.get("router.per_expert_scale"),
    )
    chosen = dataclasses.replace(
        chosen,
        expert_ids=jnp.where(mask[:, None], chosen.expert_ids, logits.shape[-1]),
        weights=jnp.where(mask[:, None], chosen.weights, 0.0),
    )
    kept = chosen
    if capacity is not None:
        kept = _within_capacity(chosen, capacity, axes, config, num_tokens, counted or num_tokens)
    if after:
        left = renormalize_weights(kept.weights, router) * router.scale
        left = jnp.where(kept.weights > 0, left, 0.0)
        kept = dataclasses.replace(kept, weights=left)
    statistics = routing_statistics(logits, chosen, config.num_experts, kept=kept, mask=mask)
    if axes.tokens:
        statistics = varying(statistics, axes.tokens)  # counts of constants do not vary
        statistics = jax.tree.map(lambda s: jax.lax.psum(s, axes.tokens), statistics)
    return kept, statistics


def _within_capacity(
    routing: Routing,
    capacity: int,
    axes: DeviceAxes,
    config: MoEConfig,
    num_tokens: int,
    counted: int,
) -> Routing:
    """Drops by the order of all tokens, whichever device holds them: the choices are few bytes.

    ``counted`` is the number of tokens among which experts' places are given, one sequence after
    another.
    """
    choices = Routing(routing.expert_ids, routing.weights, apply_to=routing.apply_to)
    importance = None
    if config.router.capacity_priority == "weight" and routing.probabilities is not None:
        importance = jax.lax.stop_gradient(routing.probabilities).max(axis=-1)
    everything = (choices, importance)
    if axes.tokens:
        everything = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axes.tokens, axis=0, tiled=True), everything
        )
    padding = jax.tree.map(lambda x: x[num_tokens:], everything[0])
    rows = jax.tree.map(lambda x: x[:num_tokens].reshape(-1, counted, *x.shape[1:]), everything)
    apply = functools.partial(
        apply_capacity,
        num_experts=config.num_experts,
        capacity=capacity,
        num_identity_experts=config.router.num_identity_experts,
        priority=config.router.capacity_priority,
    )
    kept = jax.vmap(lambda choices, first: apply(choices, importance=first))(*rows)
    kept = jax.tree.map(
        lambda x, rest: jnp.concatenate([x.reshape(-1, *x.shape[2:]), rest]), kept, padding
    )
    if axes.tokens:
        count = routing.expert_ids.shape[0]
        start = jax.lax.axis_index(axes.tokens) * count
        kept = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count, axis=0), kept)
    return dataclasses.replace(kept, probabilities=routing.probabilities)


def _identity(
    tokens: Float[Array, "t D"], routing: Routing, config: MoEConfig
) -> Float[Array, "t D"]:
    """What identity experts give: the token itself times its weights for them."""
    last = config.num_experts + config.router.num_identity_experts
    chosen = (routing.expert_ids >= config.num_experts) & (routing.expert_ids < last)
    share = jnp.sum(jnp.where(chosen, routing.weights, 0.0), axis=-1, keepdims=True)
    return (share * tokens.astype(jnp.float32)).astype(tokens.dtype)

"""The expert activation, as data: one formula that every public family's experts fit in."""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_FUNCTIONS: dict[str, tp.Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an expert turns its first product into the input of its second.

    With a gate ``g`` and an up branch ``u`` the result is ``f(g) * (u + up_offset)``; without a
    gate it is ``f(u)``. Clamping "before" bounds ``g <= limit`` and ``|u| <= limit`` ahead of
    ``f`` (gpt-oss, DeepSeek-V4); "after" bounds ``f(g) <= limit`` and ``|u| <= limit`` (Step-3).

    Args:
      function: "silu", "gelu" (exact), "gelu_tanh", "relu" or "relu2" (relu squared).
      alpha: slope inside the sigmoid of silu: ``g * sigmoid(alpha * g)``; silu only.
      up_offset: added to the up branch (gpt-oss: 1).
      limit: clamp bound, or None for no clamp.
      clamp: "before" or "after" the function.
      gated: whether a layer built with it has a gate. Functions over given weights take the
        weights' word for it (``wi.shape[1] == 2``).
    """

    function: str = "silu"
    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    clamp: tp.Literal["before", "after"] = "before"
    gated: bool = True

    def __post_init__(self):
        if self.function not in _FUNCTIONS:
            raise ValueError(
                f"activation function {self.function!r} is not known; allowed: {sorted(_FUNCTIONS)}"
            )
        if self.clamp not in ("before", "after"):
            raise ValueError(f"clamp must be 'before' or 'after', got {self.clamp!r}")
        if self.alpha != 1.0 and self.function != "silu":
            raise ValueError(f"alpha applies to silu only, got function {self.function!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive or None, got {self.limit!r}")

    def _function(self, x: jax.Array) -> jax.Array:
        if self.alpha != 1.0:
            return x * jax.nn.sigmoid(self.alpha * x)
        return _FUNCTIONS[self.function](x)

    def __call__(self, hidden: Float[Array, "... branches F"]) -> Float[Array, "... F"]:
        """Applies the activation: [..., 2, F] (gate, up) or [..., 1, F] (up alone) to [..., F]."""
        branches = hidden.shape[-2]
        if branches not in (1, 2):
            raise ValueError(f"expected 1 or 2 branches on axis -2, got shape {hidden.shape}")
        first = self.activate(hidden[..., 0, :])
        return first if branches == 1 else self.multiply(first, hidden[..., 1, :])

    def activate(self, first: jax.Array) -> jax.Array:
        """The function on the gate, or on the up branch where there is no gate."""
        if self.limit is not None and self.clamp == "before":
            first = jnp.minimum(first, self.limit)
        first = self._function(first)
        if self.limit is not None and self.clamp == "after":
            first = jnp.minimum(first, self.limit)
        return first

    def multiply(self, activated: jax.Array, up: jax.Array) -> jax.Array:
        """The activated gate times the up branch."""
        if self.limit is not None:
            up = jnp.clip(up, -self.limit, self.limit)
        return activated * (up + self.up_offset) if self.up_offset else activated * up


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu", gated=False),
    "relu2": Activation("relu2", gated=False),
    "gpt_oss": Activation("silu", alpha=1.702, up_offset=1.0, limit=7.0),
}


def resolve_activation(activation: str | Activation) -> Activation:
    """Returns the Activation that a name stands for, or the one given."""
    if isinstance(activation, Activation):
        return activation
    try:
        return ACTIVATIONS[activation]
    except (KeyError, TypeError):
        raise ValueError(
            f"activation {activation!r} is not known; allowed: {sorted(ACTIVATIONS)}"
            " or a moe_flax.Activation"
        ) from None

"""One TPU kernel sends rows to their experts' devices, runs the FFN and brings them back."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_flax.activations import Activation
from moe_flax.kernels.backend import default_platform
from moe_flax.parallel.common import ExpertWeights, FeedForward, Strategy
from moe_flax.routing import Routing
from moe_flax.sharding import MeshAxes, mesh_device_kind, mesh_platform

if tp.TYPE_CHECKING:  # imports Pallas for TPU, which few programs need
    from moe_flax.kernels.fused_ep import BlockSizes

_DTYPES = ("float32", "bfloat16")
_METHODS = ("auto", "fused", "replicated")


@dataclasses.dataclass(frozen=True)
class Fused:
    """The fused kernel as a layer's ``expert_parallel``, with options; "fused" is ``Fused()``.

    Args:
      method: "fused": the kernel; "replicated": all tokens on every device and one
        reduce-scatter, for short batches; "auto": what the cost model predicts to be faster
        ("fused" in the interpreter).
      block_sizes: `BlockSizes`; what is None in it is chosen by the VMEM model.
      chip: "v5e", "v5p", "v6e" or "tpu7x"; None takes that of the mesh's devices.
      interpret: runs without a TPU, slowly: True, or ``pltpu.InterpretParams``. Set the
        environment's NPROC above the number of devices.
    """

    method: str = "auto"
    block_sizes: "BlockSizes | None" = None
    chip: str | None = None
    interpret: tp.Any = False

    def __post_init__(self):
        if self.method not in _METHODS:
            raise ValueError(f"method must be one of {_METHODS}, got {self.method!r}")

    def strategy(self, activation: str | Activation, backend: str) -> Strategy:
        """The strategy, given what the layer computes and the backend of its grouped products."""
        return functools.partial(_fused, options=self, activation=activation, backend=backend)


def choose_fused(
    wanted: str | Fused,
    axes: MeshAxes | None,
    dtype: jax.typing.DTypeLike,
    *,
    transposed: bool = False,
) -> str | Fused:
    """Settles whether a layer takes the fused kernel: on a TPU mesh that splits experts and tokens.

    Args:
      wanted: the layer's ``expert_parallel``.
      axes: the mesh and the use of its axes, or None.
      dtype: of the computation.
      transposed: whether the weights lie transposed, which the kernel does not read.

    Returns:
      ``Fused`` for a chip, or ``wanted``, the name of another strategy or "auto".

    Raises:
      ValueError: the kernel was asked for and the mesh's devices are no TPUs, the weights lie
        transposed, or the caller's own ``shard_map`` checks varying types, which Pallas' lowering
        for TPU does not know.
      TypeError: the kernel was asked for and the dtype is not float32 or bfloat16.
    """
    options = Fused() if wanted in ("auto", "fused") else wanted
    if not isinstance(options, Fused):
        return wanted
    asked = wanted != "auto"
    if axes is None or not axes.expert or not set(axes.expert) <= set(axes.tokens):
        return "auto"
    platform = mesh_platform(axes.mesh) or default_platform()
    if not options.interpret and platform != "tpu":
        if asked:
            raise ValueError(
                f"expert_parallel {wanted!r} runs on TPUs, and the platform is {platform!r};"
                " expert_parallel='auto' takes what runs there, and"
                " moe_flax.parallel.Fused(interpret=True) interprets the kernel"
            )
        return "auto"
    if transposed:
        if asked:
            raise ValueError(
                f"expert_parallel {wanted!r} reads wi [E, J, D, F] and wo [E, F, D], and this"
                " layer's lie transposed: load it with transposed=False"
            )
        return "auto"
    if jnp.dtype(dtype).name not in _DTYPES:
        if asked:
            raise TypeError(
                f"expert_parallel {wanted!r} computes in one of {_DTYPES}, got"
                f" {jnp.dtype(dtype)}; set the layer's dtype, or expert_parallel='auto'"
            )
        return "auto"
    if _checks_varying(axes):
        if asked:
            raise ValueError(
                f"expert_parallel {wanted!r} inside a caller's shard_map needs check_vma=False:"
                " Pallas for TPU does not know of varying types; or call the layer outside"
            )
        return "auto"
    if options.chip:
        return options
    from moe_flax.kernels.fused_ep.blocks import chip_of

    kind = mesh_device_kind(axes.mesh) or jax.devices()[0].device_kind
    return dataclasses.replace(options, chip=chip_of(kind))


def _checks_varying(axes: MeshAxes) -> bool:
    """Whether a caller's ``shard_map`` tracks which axes values vary over."""
    manual = getattr(axes.mesh, "manual_axes", ())
    return any(jax.typeof(jax.lax.axis_index(axis)).manual_axis_type.varying for axis in manual)


def _fused(
    feed_forward: FeedForward,
    tokens: Float[Array, "t D"],
    routing: Routing,
    weights: ExpertWeights,
    *,
    axes: tuple[str, ...],
    options: Fused,
    activation: str | Activation,
    backend: str,
) -> Float[Array, "t D"]:
    """A strategy, see `parallel.common.Strategy`; the kernel has an FFN of its own."""
    from moe_flax.kernels.fused_ep import fused_ep_local

    del feed_forward
    return fused_ep_local(
        tokens,
        weights.wi,
        weights.wo,
        routing,
        axes=axes,
        activation=activation,
        wi_scale=weights.wi_scale,
        wo_scale=weights.wo_scale,
        wi_bias=weights.wi_bias,
        wo_bias=weights.wo_bias,
        block_sizes=options.block_sizes,
        chip=options.chip or "v5p",
        method=options.method,
        backend=backend,
        interpret=options.interpret,
    )

"""`fused_ep_moe`: the public function over global arrays, its checks and its ``shard_map``."""

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from moe_flax.activations import Activation, resolve_activation
from moe_flax.kernels.fused_ep.blocks import BlockSizes, chip_of
from moe_flax.kernels.fused_ep.local import fused_ep_local
from moe_flax.routing import Routing
from moe_flax.sharding import mesh_device_kind

_TOKEN_DTYPES = ("float32", "bfloat16")
_WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


def fused_ep_moe(
    tokens: Float[Array, "T D"],
    wi: Shaped[Array, "E J D F"],
    wo: Shaped[Array, "E F D"],
    routing: Routing,
    *,
    mesh: tp.Any,
    expert_axis: str | tuple[str, ...] = "expert",
    tensor_axis: str | None = "tensor",
    activation: str | Activation = "silu",
    wi_scale: Float[Array, "..."] | None = None,
    wo_scale: Float[Array, "..."] | None = None,
    wi_bias: Float[Array, "E J F"] | None = None,
    wo_bias: Float[Array, "E D"] | None = None,
    block_sizes: BlockSizes | None = None,
    chip: str | None = None,
    method: str = "auto",
    backend: str = "auto",
    interpret: tp.Any = False,
    traffic: bool = False,
) -> Float[Array, "T D"]:
    """Sends token rows to their experts' devices, runs the gated FFN there and sums at home.

    One Pallas kernel a device: rows travel by remote copies of whole blocks, weights stream
    through VMEM once, rows return while the next expert computes. Equal to
    `moe_flax.expert_ffn` within rounding; differentiable in tokens, routing weights, wi, wo,
    biases and scales (quantised values get none).

    Args:
      tokens: [T, D], float32 or bfloat16; any T. Split over all mesh axes but ``tensor_axis``.
      wi: [E, J, D, F]; J is 2 (gate 0, up 1), or 1 without a gate. float32, bfloat16, int8 or
        float8. E is split over ``expert_axis`` (E that does not divide is filled up, which copies
        the weights: store them filled up, ids never name the padding) and F over ``tensor_axis``.
      wo: [E, F, D].
      routing: expert_ids [T, K], weights [T, K]; ids of E and more have no expert.
      mesh: a mesh with the expert axis, of Auto or Explicit axes.
      expert_axis: its name, or several names.
      tensor_axis: the axis that splits F, where the mesh has it; None for none.
      activation: a name or an Activation.
      wi_scale: scales of a quantised wi, as `moe_flax.quantize.dequantize` takes them: a scale a
        channel [E, J, 1, F], a window [E, J, n, F], a 128 x 128 block.
      wo_scale: the same for wo.
      wi_bias: [E, J, F].
      wo_bias: [E, D].
      block_sizes: BlockSizes; what is None in it is chosen by the VMEM model.
      chip: "v5e", "v5p", "v6e" or "tpu7x"; None takes that of the mesh's devices.
      method: "fused"; "replicated": all tokens on every device and one reduce-scatter, for short
        batches; "auto": what the cost model predicts to be faster ("fused" in the interpreter).
      backend: of the grouped products of the backward pass and of "replicated".
      interpret: as for ``pallas_call``; True is Pallas' TPU interpreter, which blocks a thread a
        device: set the environment's NPROC above the number of devices.
      traffic: return counts of the copies started, [devices, len(kernel.STATS)], instead.

    Returns:
      [T, D] in the dtype of tokens.

    Raises:
      ValueError: shapes, mesh or block sizes that do not fit; the message has the arithmetic.
      TypeError: dtypes that are not allowed.
    """
    axes = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
    sizes = dict(mesh.shape)
    for axis in axes:
        if axis not in sizes:
            raise ValueError(f"expert_axis {axis!r} is no axis of the mesh, which has {sizes}")
    tensor = tensor_axis if tensor_axis in sizes and tensor_axis not in axes else None
    _check(tokens, wi, wo, routing, wi_bias, wo_bias, wi_scale, wo_scale)
    activation = resolve_activation(activation)
    if wi.shape[1] == 1 and activation.up_offset:
        raise ValueError(
            f"activation {activation} offsets the up branch of a gated FFN: wi must be"
            f" [E, 2, D, F], got {wi.shape}"
        )
    ways = sizes[tensor] if tensor else 1
    if wi.shape[-1] % ways:
        raise ValueError(
            f"F={wi.shape[-1]} does not divide over mesh axis {tensor!r} of {ways} devices"
        )
    experts = math.prod(sizes[axis] for axis in axes)
    token_axes = tuple(axis for axis in mesh.axis_names if axis != tensor)
    shards = math.prod(sizes[axis] for axis in token_axes)
    num_tokens, num_experts = tokens.shape[0], wi.shape[0]

    extra = -num_tokens % shards
    filled = -num_experts % experts
    ids, weights = routing.expert_ids, routing.weights
    if extra:  # no sharding of T tokens is one of T + extra
        whole = PartitionSpec()
        tokens, ids, weights = (_reshard(x, mesh, whole) for x in (tokens, ids, weights))
    ids = jnp.where(ids < 0, num_experts, ids)
    ids = jnp.where(ids >= num_experts, num_experts + filled, ids)
    ids = jnp.pad(ids, ((0, extra), (0, 0)), constant_values=num_experts + filled)
    tokens, weights = (jnp.pad(x, ((0, extra), (0, 0))) for x in (tokens, weights))
    operands = [wi, wo, wi_scale, wo_scale, wi_bias, wo_bias]
    if filled:
        operands = [
            x if x is None else jnp.pad(x, [(0, filled)] + [(0, 0)] * (x.ndim - 1))
            for x in operands
        ]
    expert = axes[0] if len(axes) == 1 else axes
    rows = PartitionSpec(token_axes)
    # Scales of one a tensor shard, or of all of them, lie as the weights do.
    specs = [
        PartitionSpec(expert, None, None, tensor),
        PartitionSpec(expert, tensor, None),
        PartitionSpec(expert, None, None, _splits(wi_scale, -1, ways, tensor, "wi_scale")),
        PartitionSpec(expert, _splits(wo_scale, -2, ways, tensor, "wo_scale"), None),
        PartitionSpec(expert, None, tensor),
        PartitionSpec(expert, None),
    ]
    specs = [None if x is None else spec for x, spec in zip(operands, specs, strict=True)]
    chip = chip or chip_of(mesh_device_kind(mesh))

    def device(tokens, ids, weights, *operands):
        wi, wo, wi_scale, wo_scale, wi_bias, wo_bias = operands
        if tensor and wo_bias is not None:  # one shard's to add
            wo_bias = jnp.where(jax.lax.axis_index(tensor) == 0, wo_bias, 0)
        out = fused_ep_local(
            tokens,
            wi,
            wo,
            Routing(ids, weights, apply_to=routing.apply_to),
            axes=axes,
            activation=activation,
            wi_scale=wi_scale,
            wo_scale=wo_scale,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            block_sizes=block_sizes,
            chip=chip,
            method=method,
            backend=backend,
            interpret=interpret,
            traffic=traffic,
        )
        if traffic:
            return out[None]
        if tensor:
            out = jax.lax.psum(out.astype(jnp.float32), tensor).astype(tokens.dtype)
        return out

    arguments = [tokens, ids, weights, *operands]
    in_specs = [rows, rows, rows, *specs]
    arguments = [
        x if x is None else _reshard(x, mesh, spec)
        for x, spec in zip(arguments, in_specs, strict=True)
    ]
    out_specs = PartitionSpec(mesh.axis_names) if traffic else rows
    # Pallas' interpreter does not know of varying types, so they are not checked.
    result = jax.shard_map(
        device, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )(*arguments)
    if traffic or not extra:
        return result
    return _reshard(result, mesh, PartitionSpec())[:num_tokens]


def _reshard(x: jax.Array, mesh: tp.Any, spec: PartitionSpec) -> jax.Array:
    """Explicit axes have to be told; Auto axes find out by themselves."""
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def _splits(scale, axis: int, ways: int, tensor: str | None, name: str) -> str | None:
    """Whether the tensor axis splits an axis of scales: yes unless there is one for all."""
    if scale is None or tensor is None or scale.shape[axis] == 1:
        return None
    if scale.shape[axis] % ways:
        raise ValueError(
            f"{name} of shape {scale.shape}: {scale.shape[axis]} scales do not divide over mesh"
            f" axis {tensor!r} of {ways} devices"
        )
    return tensor


def _check(tokens, wi, wo, routing, wi_bias, wo_bias, wi_scale, wo_scale) -> None:
    """Raises where the operands do not fit one another."""
    ids, weights = routing.expert_ids, routing.weights
    ranks = {"tokens [T, D]": (tokens, 2), "wi [E, J, D, F]": (wi, 4), "wo [E, F, D]": (wo, 3)}
    for name, (operand, rank) in ranks.items():
        if operand.ndim != rank:
            raise ValueError(f"fused_ep_moe takes {name}, got shape {operand.shape}")
    num_tokens, features = tokens.shape
    experts, branches, _, hidden = wi.shape
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(f"routing.expert_ids must be [T, K] with K >= 1, got shape {ids.shape}")
    wanted = {
        "wi": (wi, (experts, branches, features, hidden)),
        "wo": (wo, (experts, hidden, features)),
        "wi_bias": (wi_bias, (experts, branches, hidden)),
        "wo_bias": (wo_bias, (experts, features)),
        "routing.expert_ids": (ids, (num_tokens, ids.shape[1])),
        "routing.weights": (weights, ids.shape),
    }
    for name, (operand, shape) in wanted.items():
        if operand is not None and operand.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape}, got {operand.shape} (tokens {tokens.shape},"
                f" wi {wi.shape}, wo {wo.shape}, expert_ids {ids.shape})"
            )
    if branches not in (1, 2):
        raise ValueError(f"axis 1 of wi must be 2 (gate, up) or 1 (no gate), got {wi.shape}")
    if tokens.dtype.name not in _TOKEN_DTYPES:
        raise TypeError(f"tokens must have a dtype of {_TOKEN_DTYPES}, got {tokens.dtype}")
    for name, weight, scale in (("wi", wi, wi_scale), ("wo", wo, wo_scale)):
        if weight.dtype.name not in _WEIGHT_DTYPES:
            raise TypeError(f"{name} must have a dtype of {_WEIGHT_DTYPES}, got {weight.dtype}")
        if weight.dtype.itemsize == 1 and scale is None:
            raise ValueError(f"{name} of {weight.dtype} needs {name}_scale")
        if scale is not None and (
            scale.ndim != weight.ndim or scale.shape[0] not in (1, weight.shape[0])
        ):
            raise ValueError(
                f"{name}_scale must have {weight.ndim} axes and {weight.shape[0]} experts,"
                f" got {scale.shape}"
            )
    if num_tokens * ids.shape[1] >= 2**31:
        raise ValueError(
            f"fused_ep_moe takes up to 2**31 - 1 slots, got T={num_tokens} times"
            f" K={ids.shape[1]}: split the tokens"
        )

"""Compiles a layer's fused kernel for a TPU that is not there, and says what it needs.

libtpu holds the whole compiler: with ``pip install 'moe-flax[tpu]'`` a machine without a TPU can
tell whether a layer compiles for a slice, and what it takes of VMEM and HBM.
"""

import dataclasses
import math
import os
import time
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_flax.activations import resolve_activation
from moe_flax.config import MoEConfig
from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe
from moe_flax.kernels.fused_ep.blocks import MIB, scratch_bytes, vmem_table
from moe_flax.kernels.fused_ep.cost import Layer, Prediction, predict_fused, predict_replicated
from moe_flax.kernels.fused_ep.local import Call, Parameters, Sized, prepare, size_up
from moe_flax.routing import Routing

_DTYPES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
_ACCELERATORS = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-8"}


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What compiling a layer showed.

    Attributes:
      topology: as asked for.
      mesh: axis sizes.
      tokens: tokens a device.
      blocks: rows, hidden, features and receive_rows that the VMEM model chose.
      vmem: bytes of VMEM by what takes them.
      hbm_scratch: bytes of a pass' receive buffer on one device.
      arguments: bytes of tokens, routing and weights on one device, as the compiler reports them.
      temporaries: bytes of everything temporary on one device, as the compiler reports them.
      compile_seconds: what the compiler took.
      fused: predicted time of the fused kernel.
      replicated: predicted time of the fallback for short batches.
    """

    topology: str
    mesh: dict[str, int]
    tokens: int
    blocks: BlockSizes
    vmem: dict[str, int]
    hbm_scratch: int
    arguments: int
    temporaries: int
    compile_seconds: float
    fused: Prediction
    replicated: Prediction

    def __str__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in self.vmem.items())
        fused = self.fused
        return "\n".join(
            [
                f"compiles for {self.topology}, mesh {mesh}, {self.tokens} tokens a device, in"
                f" {self.compile_seconds:.1f} s",
                f"  blocks: rows {self.blocks.rows}, hidden {self.blocks.hidden}, features"
                f" {self.blocks.features}, receive buffer {self.blocks.receive_rows} rows",
                f"  VMEM {sum(self.vmem.values()) / MIB:.1f} MiB: {parts}",
                f"  HBM a device: receive buffer {self.hbm_scratch / MIB:.0f} MiB, arguments"
                f" {self.arguments / MIB:.0f} MiB, temporaries in all"
                f" {self.temporaries / MIB:.0f} MiB",
                f"  predicted {1e6 * fused.seconds:.0f} us a pass: products"
                f" {1e6 * fused.products:.0f}, HBM {1e6 * fused.hbm:.0f}, ICI"
                f" {1e6 * fused.ici:.0f}, not hidden {1e6 * fused.fixed:.0f}; replicated tokens"
                f" instead: {1e6 * self.replicated.seconds:.0f} us",
            ]
        )


def layer_sizes(
    config: MoEConfig,
    mesh: tp.Mapping[str, int],
    tokens: int,
    *,
    weight_dtype: str = "bfloat16",
    chip: str = "v6e",
) -> tuple[Sized, Layer]:
    """Blocks, buffers and the prediction's sizes of one device, without compiling anything.

    Args:
      config: the layer.
      mesh: axis names and sizes.
      tokens: tokens of one device.
      weight_dtype: as for `compile_report`.
      chip: a name of ``kernels.fused_ep.blocks.CHIPS``.

    Raises:
      ValueError: a mesh without "expert", an F that does not divide, or no blocks that fit.
    """
    if weight_dtype not in _DTYPES:
        raise ValueError(f"weight_dtype must be one of {sorted(_DTYPES)}, got {weight_dtype!r}")
    if "expert" not in mesh:
        raise ValueError(f"the mesh needs an axis 'expert', got {mesh}")
    devices, ways = mesh["expert"], mesh.get("tensor", 1)
    experts = -(-config.num_experts // devices)
    if config.hidden_features % ways:
        raise ValueError(f"F={config.hidden_features} does not divide over tensor={ways}")
    hidden = config.hidden_features // ways
    activation = resolve_activation(config.activation)
    branches = 2 if activation.gated else 1
    call = Call(("expert",), activation, config.num_experts_per_token, chip=chip)
    dtype = jnp.dtype(weight_dtype)

    def shape(*sizes, dtype: tp.Any = jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    d, scaled, bias = config.features, dtype.itemsize == 1, config.use_bias
    parameters = Parameters(
        wi=shape(experts, branches, d, hidden, dtype=dtype),
        wo=shape(experts, hidden, d, dtype=dtype),
        wi_scale=shape(experts, branches, 1, hidden) if scaled else None,
        wo_scale=shape(experts, 1, d) if scaled else None,
        wi_bias=shape(experts, branches, hidden) if bias else None,
        wo_bias=shape(experts, d) if bias else None,
    )
    ffns = []
    rows = jnp.dtype(jnp.bfloat16)
    jax.eval_shape(lambda each: ffns.append(prepare(call, rows, d, each)[0]), parameters)
    (ffn,) = ffns
    sized = size_up(call, tokens * call.k, (devices,), ffn)
    layer = Layer(
        experts=experts * devices,
        k=call.k,
        features=d,
        hidden=hidden,
        devices=devices,
        tokens=tokens,
        weight_bytes=dtype.itemsize,
        branches=branches,
    )
    return sized, layer


def compile_report(
    config: MoEConfig,
    topology: str,
    mesh: tp.Mapping[str, int],
    *,
    tokens: int = 1024,
    weight_dtype: str = "bfloat16",
) -> CompileReport:
    """Compiles the routed experts of a layer for a TPU slice.

    Args:
      config: the layer; `MoEConfig.preset` has public models'.
      topology: a slice such as "v6e:4x4", "v5p:2x2x1" or "tpu7x:2x2x1".
      mesh: axis names and sizes; needs "expert", takes "tensor" and axes that split tokens.
      tokens: tokens of one device.
      weight_dtype: "bfloat16", "float32", "int8", "float8_e4m3fn" or "float8_e5m2" (scales a
        channel).

    Raises:
      ValueError: an unknown topology or chip, a mesh that does not fit it, or a layer that fits no
        VMEM; or libtpu is not installed.
    """
    chip = topology.partition(":")[0]
    if chip not in _ACCELERATORS:
        raise ValueError(
            f"topology must start with one of {sorted(_ACCELERATORS)}, got {topology!r}"
        )
    sizes = dict(mesh)
    sized, layer = layer_sizes(config, sizes, tokens, weight_dtype=weight_dtype, chip=chip)
    devices = _topology_devices(topology, chip)
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(f"mesh {sizes} needs {count} devices; {topology} has {len(devices)}")
    devices = np.array(devices[:count]).reshape(tuple(sizes.values()))
    device_mesh = Mesh(devices, tuple(sizes))
    seconds, memory = _compile(config, device_mesh, layer, tokens, weight_dtype, chip)
    ffn = sized.ffn
    return CompileReport(
        topology=topology,
        mesh=sizes,
        tokens=tokens,
        blocks=BlockSizes(ffn.rows, ffn.hidden_block, ffn.feature_block, sized.capacity),
        vmem=vmem_table(ffn),
        hbm_scratch=scratch_bytes(sized.capacity, ffn.words),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        fused=predict_fused(layer, chip, ffn.rows),
        replicated=predict_replicated(layer, chip),
    )


def _topology_devices(topology: str, chip: str) -> list:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", _ACCELERATORS[chip])
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as error:
        raise ValueError(
            f"cannot compile for {topology}: {error}; it needs libtpu (pip install 'moe-flax[tpu]')"
        ) from error
    return list(description.devices)


def _compile(config, mesh, layer: Layer, tokens: int, weight_dtype: str, chip: str):
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    rows = PartitionSpec(tuple(axis for axis in mesh.axis_names if axis != tensor))
    total = tokens * math.prod(size for axis, size in mesh.shape.items() if axis != tensor)
    e, d, f = layer.experts, layer.features, config.hidden_features
    scaled = jnp.dtype(weight_dtype).itemsize == 1

    def operand(shape, spec, dtype: tp.Any = jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    expert = PartitionSpec("expert")
    wide = PartitionSpec("expert", None, None, tensor)
    extra = {}
    if scaled:
        extra["wi_scale"] = operand((e, layer.branches, 1, f), wide)
        extra["wo_scale"] = operand((e, 1, d), expert)
    if config.use_bias:
        extra["wi_bias"] = operand((e, layer.branches, f), PartitionSpec("expert", None, tensor))
        extra["wo_bias"] = operand((e, d), expert)

    def run(tokens, ids, weights, wi, wo, extra):
        return fused_ep_moe(
            tokens,
            wi,
            wo,
            Routing(ids, weights, apply_to=config.router.apply_to),
            mesh=mesh,
            activation=config.activation,
            chip=chip,
            method="fused",
            **extra,
        )

    k = config.num_experts_per_token
    dtype = jnp.dtype(weight_dtype)
    arguments = (
        operand((total, d), rows, jnp.bfloat16),
        operand((total, k), rows, jnp.int32),
        operand((total, k), rows),
        operand((e, layer.branches, d, f), wide, dtype),
        operand((e, f, d), PartitionSpec("expert", tensor, None), dtype),
        extra,
    )
    start = time.perf_counter()
    compiled = jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    return time.perf_counter() - start, compiled.memory_analysis()

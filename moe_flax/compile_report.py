"""Compiles a layer for a TPU that is not there, and says what it needs and should take.

libtpu holds the whole compiler: with ``pip install 'moe-flax[tpu]'`` a machine without a TPU can
tell whether a layer compiles for a slice, and what it takes of VMEM and HBM.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_flax.activations import resolve_activation
from moe_flax.config import MoEConfig
from moe_flax.forward import Forward
from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe
from moe_flax.kernels.fused_ep.blocks import MIB, scratch_bytes, vmem_table
from moe_flax.kernels.fused_ep.call import Call, Parameters, Sized, prepare, size_up
from moe_flax.kernels.fused_ep.cost import (
    Layer,
    Prediction,
    explain_fused,
    predict_fused,
    predict_replicated,
)
from moe_flax.parallel import Fused
from moe_flax.parallel.mesh import over_mesh
from moe_flax.parameters import parameter_shapes
from moe_flax.routing import Routing
from moe_flax.sharding import resolve_axes

WEIGHT_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
PARTS = ("layer", "experts")
_ACCELERATORS = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-8"}
_SHAPES = "such as v5e:2x2, v5p:2x2x1, v6e:4x4 or tpu7x:2x2x1"


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What compiling a layer showed.

    Attributes:
      topology: as asked for.
      mesh: axis sizes.
      part: "layer" or "experts", what was compiled.
      tokens: tokens a device.
      weight_dtype: of the experts.
      blocks: rows, hidden, features and receive_rows that the VMEM model chose.
      vmem: bytes of VMEM by what takes them.
      hbm_scratch: bytes of a pass' receive buffer on one device.
      arguments: bytes of tokens and weights on one device, as the compiler reports them.
      temporaries: bytes of everything temporary on one device, as the compiler reports them.
      compile_seconds: what tracing, lowering and the compiler took.
      fused: predicted time of the fused kernel.
      replicated: predicted time of the fallback for short batches.
      arithmetic: how ``fused`` came about, in lines.
    """

    topology: str
    mesh: dict[str, int]
    part: str
    tokens: int
    weight_dtype: str
    blocks: BlockSizes
    vmem: dict[str, int]
    hbm_scratch: int
    arguments: int
    temporaries: int
    compile_seconds: float
    fused: Prediction
    replicated: Prediction
    arithmetic: tuple[str, ...]

    def __str__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in self.vmem.items())
        what = "the layer compiles" if self.part == "layer" else "its routed experts compile"
        shorter = "shorter" if self.replicated.seconds < self.fused.seconds else "longer"
        return "\n".join(
            [
                f"{what} for {self.topology}, mesh {mesh}, {self.tokens} tokens a device,"
                f" {self.weight_dtype} weights, in {self.compile_seconds:.1f} s",
                f"  blocks      rows {self.blocks.rows}, hidden {self.blocks.hidden}, features"
                f" {self.blocks.features}",
                f"  VMEM        {sum(self.vmem.values()) / MIB:.1f} MiB: {parts}",
                f"  HBM         a device: receive buffer {self.hbm_scratch / MIB:.1f} MiB"
                f" ({self.blocks.receive_rows} rows), arguments {self.arguments / MIB:.1f} MiB,"
                f" temporaries in all {self.temporaries / MIB:.1f} MiB",
                f"  predicted   {1e6 * self.fused.seconds:.0f} us a pass of the fused kernel under"
                " even routing, not measured:",
                *(f"    {line}" for line in self.arithmetic),
                f"  fallback    {1e6 * self.replicated.seconds:.0f} us with replicated tokens and"
                f" one reduce-scatter instead: {shorter}",
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
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype must be one of {WEIGHT_DTYPES}, got {weight_dtype!r}")
    if tokens < 1:
        raise ValueError(f"tokens of a device must be 1 or more, got {tokens}")
    if "expert" not in mesh:
        raise ValueError(f"the mesh needs an axis 'expert', got {dict(mesh)}")
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
    rows = _row_dtype(weight_dtype)
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
        row_bytes=rows.itemsize,
    )
    return sized, layer


def compile_report(
    config: MoEConfig,
    topology: str,
    mesh: tp.Mapping[str, int],
    *,
    tokens: int = 1024,
    weight_dtype: str = "bfloat16",
    part: str = "experts",
) -> CompileReport:
    """Compiles a layer for a TPU slice, with the fused kernel.

    Args:
      config: the layer; `MoEConfig.preset` has public models'.
      topology: a slice such as "v6e:4x4", "v5p:2x2x1" or "tpu7x:2x2x1".
      mesh: axis names and sizes, together all devices of the slice; needs "expert", takes
        "tensor", and axes that split tokens.
      tokens: tokens of one device.
      weight_dtype: "bfloat16", "float32", "int8", "float8_e4m3fn" or "float8_e5m2" (scales a
        channel). Rows are float32 with float32 weights, else bfloat16.
      part: "layer": router, exchange, routed and shared experts, as `moe_flax.MoE` runs them;
        "experts": `fused_ep_moe` alone, which quantised weights need.

    Raises:
      ValueError: an unknown topology or chip, a mesh that does not fit it, a layer that fits no
        VMEM or that the compiler refuses; or libtpu is not installed.
    """
    chip = topology.partition(":")[0]
    if chip not in _ACCELERATORS:
        raise ValueError(
            f"topology must start with one of {sorted(_ACCELERATORS)}, {_SHAPES}; got {topology!r}"
        )
    if part not in PARTS:
        raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    sizes = dict(mesh)
    sized, layer = layer_sizes(config, sizes, tokens, weight_dtype=weight_dtype, chip=chip)
    if part == "layer" and jnp.dtype(weight_dtype).itemsize == 1:
        raise ValueError(
            f"the layer holds no {weight_dtype} weights: part='experts' compiles them alone"
        )
    devices = _topology_devices(topology, chip)
    count = math.prod(sizes.values())
    if count != len(devices):
        raise ValueError(
            f"mesh {sizes} has {count} devices in all, and {topology} has {len(devices)}"
            + (" (two a chip)" if chip == "tpu7x" else "")
            + ": the product of the mesh's axes must be that"
        )
    device_mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    program = _layer_program if part == "layer" else _experts_program
    run, arguments = program(config, device_mesh, layer, tokens, weight_dtype, chip)
    seconds, memory = _compile(run, arguments, topology)
    ffn = sized.ffn
    return CompileReport(
        topology=topology,
        mesh=sizes,
        part=part,
        tokens=tokens,
        weight_dtype=weight_dtype,
        blocks=BlockSizes(ffn.rows, ffn.hidden_block, ffn.feature_block, sized.capacity),
        vmem=vmem_table(ffn),
        hbm_scratch=scratch_bytes(sized.capacity, ffn.words),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        fused=predict_fused(layer, chip, ffn.rows),
        replicated=predict_replicated(layer, chip),
        arithmetic=tuple(explain_fused(layer, chip, ffn.rows)),
    )


def _row_dtype(weight_dtype: str) -> jnp.dtype:
    return jnp.dtype("float32" if weight_dtype == "float32" else "bfloat16")


def _topology_devices(topology: str, chip: str) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for {topology} needs libtpu, which is not installed:"
            " pip install 'moe-flax[tpu]'"
        )
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", _ACCELERATORS[chip]),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # no device is used: others may be at work
    ):
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as error:
        raise ValueError(f"no slice {topology!r}, {_SHAPES}: {error}") from error
    return list(description.devices)


def _compile(run, arguments, topology: str):
    start = time.perf_counter()
    try:
        compiled = jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        vmem = re.search(r"Scoped allocation with size (\S+) and limit (\S+)", message)
        if vmem:
            message = f"it needs {vmem[1]} of VMEM and was given {vmem[2]}"
        raise ValueError(f"the compiler refuses it for {topology}: {message:.600}") from error
    return time.perf_counter() - start, compiled.memory_analysis()


def _operand(mesh: Mesh, shape, spec: PartitionSpec, dtype: tp.Any = jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _layer_program(config, mesh, layer: Layer, tokens: int, weight_dtype: str, chip: str):
    """The layer's own computation, over parameters as it stores them."""
    axes = resolve_axes(mesh)
    dtype = _row_dtype(weight_dtype)
    forward = Forward(
        config=config, backend="tpu", expert_parallel=Fused(method="fused", chip=chip)
    )
    shapes = parameter_shapes(config)

    def run(parameters, tokens, mask):
        return over_mesh(forward, parameters, shapes, tokens, mask, axes)[0]

    rows = PartitionSpec(axes.tokens)
    total = tokens * axes.size(axes.tokens)
    parameters = {
        name: _operand(
            mesh,
            shape,
            axes.spec(name, shape),
            jnp.float32 if name.startswith("router.") else dtype,
        )
        for name, shape in shapes.items()
    }
    tokens_in = _operand(mesh, (total, config.features), rows, dtype)
    return run, (parameters, tokens_in, _operand(mesh, (total,), rows, jnp.bool_))


def _experts_program(config, mesh, layer: Layer, tokens: int, weight_dtype: str, chip: str):
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    rows = PartitionSpec(tuple(axis for axis in mesh.axis_names if axis != tensor))
    total = tokens * math.prod(size for axis, size in mesh.shape.items() if axis != tensor)
    e, d, f = layer.experts, layer.features, config.hidden_features
    expert = PartitionSpec("expert")
    wide = PartitionSpec("expert", None, None, tensor)
    extra = {}
    if jnp.dtype(weight_dtype).itemsize == 1:
        extra["wi_scale"] = _operand(mesh, (e, layer.branches, 1, f), wide)
        extra["wo_scale"] = _operand(mesh, (e, 1, d), expert)
    if config.use_bias:
        spec = PartitionSpec("expert", None, tensor)
        extra["wi_bias"] = _operand(mesh, (e, layer.branches, f), spec)
        extra["wo_bias"] = _operand(mesh, (e, d), expert)

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

    k, dtype = config.num_experts_per_token, jnp.dtype(weight_dtype)
    return run, (
        _operand(mesh, (total, d), rows, _row_dtype(weight_dtype)),
        _operand(mesh, (total, k), rows, jnp.int32),
        _operand(mesh, (total, k), rows),
        _operand(mesh, (e, layer.branches, d, f), wide, dtype),
        _operand(mesh, (e, f, d), PartitionSpec("expert", tensor, None), dtype),
        extra,
    )

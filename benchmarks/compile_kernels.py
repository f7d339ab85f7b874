"""Compiles the Triton kernels for GPUs that need not be there; prints what the assembler says.

    python benchmarks/compile_kernels.py [--json FILE] [80 90 100]

Needs jax-triton, triton and the GPU plugin's wheel (without its CUDA libraries): on a machine
without a GPU, `pip install jax-triton triton` and `pip install --no-deps jax-cuda13-plugin`, each
of the versions that the gpu extra names.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import typing as tp
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import triton

from moe_flax import quantize
from moe_flax.activations import resolve_activation
from moe_flax.kernels.grouped_matmul.triton import ffn, ffn_float8, ffn_kept, launch

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
# T, E, K, D, F, activation, branches, biases, dtype, with gradients
CASES = {
    "long groups": (8192, 8, 2, 1024, 2048, "silu", 2, False, "bfloat16", True),
    "short hidden axis": (8192, 8, 2, 1024, 512, "silu", 2, False, "bfloat16", False),
    "groups of about 64": (256, 8, 2, 1024, 2048, "silu", 2, True, "bfloat16", False),
    "groups of about 16": (64, 8, 2, 1024, 2048, "gpt_oss", 2, True, "bfloat16", False),
    "groups of about 4": (16, 8, 2, 1024, 2048, "relu2", 1, False, "bfloat16", False),
    "odd widths": (64, 8, 2, 257, 451, "gelu", 2, True, "float16", True),
    "float32": (512, 8, 2, 264, 320, "gelu_tanh", 2, False, "float32", True),
    "no gate": (1200, 4, 2, 256, 520, "relu2", 1, True, "bfloat16", True),
    "a branch off 16 bytes": (256, 8, 3, 512, 682, "silu", 2, False, "float32", True),
}
# T, E, K, D, F, activation, branches, biases, whether product 1 applies the activation
FLOAT8_CASES = {
    "float8": (8192, 8, 2, 1024, 2048, "silu", 2, False, True),
    "float8, activation apart": (8192, 8, 2, 1024, 2048, "silu", 2, False, False),
    "float8, short hidden axis": (8192, 8, 2, 1024, 512, "silu", 2, True, True),
    "float8, no gate": (8192, 8, 2, 1024, 2048, "relu2", 1, True, True),
    "float8, groups of about 64": (256, 8, 2, 1024, 2048, "gpt_oss", 2, True, True),
    "float8, groups of about 16": (64, 8, 2, 1024, 2048, "gpt_oss", 2, True, True),
    "float8, groups of about 4": (16, 8, 2, 1024, 2048, "silu", 2, False, True),
    "float8, odd widths": (4096, 8, 2, 257, 451, "silu", 2, True, True),
}
# The same with quantised weights: T, E, K, D, F, activation, branches, biases, how they are held
KEPT = {
    "blocks, groups of about 4": (16, 8, 2, 1024, 2048, "silu", 2, False, "block"),
    "blocks, groups of about 64": (256, 8, 2, 1024, 2048, "silu", 2, True, "block"),
    "mxfp4, groups of about 8": (32, 8, 2, 1440, 1440, "gpt_oss", 2, True, "mxfp4"),
    "mxfp4, groups of about 64": (256, 8, 2, 1024, 2048, "silu", 2, False, "mxfp4"),
    "int8, groups of about 16": (64, 8, 2, 1024, 2048, "relu2", 1, True, "channel"),
    "blocks, odd widths": (64, 8, 2, 264, 451, "silu", 2, False, "block"),
}
QUANTIZE = {
    "block": quantize.quantize_blocks,
    "channel": quantize.quantize_channels,
    "mxfp4": quantize.quantize_mxfp4,
}
ONLY = {"short hidden axis": 90}  # elsewhere the kernels are those of long groups


class Kernel(tp.NamedTuple):
    """What a lowered program launches: name, warps and bytes of shared memory of one program."""

    name: str
    warps: int
    shared: int
    ptx: str


def lower(case: tuple, capability: int) -> list[Kernel]:
    """Lowers one case for a chip; returns the kernels that its program launches."""
    tokens, experts, top_k, features, hidden, name, branches, biases, dtype, gradients = case
    shape = jax.ShapeDtypeStruct
    x = shape((tokens, features), dtype)
    wi = shape((experts, branches, features, hidden), dtype)
    wo = shape((experts, hidden, features), dtype)
    wi_bias = shape((experts, branches, hidden), jnp.float32) if biases else None
    wo_bias = shape((experts, features), jnp.float32) if biases else None
    ids, weights = shape((tokens, top_k), jnp.int32), shape((tokens, top_k), jnp.float32)
    with launch.compile_for(capability):
        call = ffn.make_call(resolve_activation(name), x, wi, ids)
        run = functools.partial(ffn.routed_ffn, call)
        if gradients:

            def run(x, wi, wo, wi_bias, wo_bias, ids, weights):
                def loss(*args):
                    return ffn.routed_ffn(call, *args[:5], ids, args[5])

                y, pull = jax.vjp(loss, x, wi, wo, wi_bias, wo_bias, weights)
                return y, pull(y)

        return _kernels(run, x, wi, wo, wi_bias, wo_bias, ids, weights)


def lower_float8(case: tuple, capability: int) -> list[Kernel]:
    """As `lower`, the layer with float8 rows and matrices."""
    tokens, experts, top_k, features, hidden, name, branches, biases, fused = case
    shape = jax.ShapeDtypeStruct
    wi = shape((experts, branches, hidden, features), jnp.float8_e4m3fn)
    wo = shape((experts, features, hidden), jnp.float8_e4m3fn)
    scales = [shape((*w.shape[:-1], 1), jnp.float32) for w in (wi, wo)]
    bias = [shape(w.shape[:-1], jnp.float32) if biases else None for w in (wi, wo)]
    ids, weights = shape((tokens, top_k), jnp.int32), shape((tokens, top_k), jnp.float32)
    x = shape((tokens, features), jnp.bfloat16)
    with launch.compile_for(capability):
        call = ffn_float8.make_call(resolve_activation(name), 100.0, wi, ids)
        if not fused:
            call = dataclasses.replace(call, fused=False, up=call.down)
        run = functools.partial(ffn_float8.routed_ffn, call)
        return _kernels(run, x, wi, wo, *scales, *bias, ids, weights)


def lower_kept(case: tuple, capability: int) -> list[Kernel]:
    """The same for weights kept quantised and transposed."""
    tokens, experts, top_k, features, hidden, name, branches, biases, kind = case
    shape = jax.ShapeDtypeStruct
    x = shape((tokens, features), "bfloat16")
    wi = shape((experts, branches, hidden, features), "bfloat16")
    wo = shape((experts, features, hidden), "bfloat16")
    (wi, wi_scale), (wo, wo_scale) = (jax.eval_shape(QUANTIZE[kind], w) for w in (wi, wo))
    wi_bias = shape((experts, branches, hidden), jnp.float32) if biases else None
    wo_bias = shape((experts, features), jnp.float32) if biases else None
    ids, weights = shape((tokens, top_k), jnp.int32), shape((tokens, top_k), jnp.float32)
    with launch.compile_for(capability):
        call = ffn_kept.make_call(resolve_activation(name), x, wi, wo, wi_scale, wo_scale, ids)
        if call is None:
            raise ValueError(f"{case} is dequantised ahead")
        run = functools.partial(ffn_kept.routed_ffn, call)
        return _kernels(run, x, wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights)


def _kernels(run: tp.Callable, *arguments) -> list[Kernel]:
    """Lowers a function of shapes; returns what it launches."""
    traced = jax.jit(run).trace(*arguments)
    module: tp.Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    return [
        _kernel(op.attributes["mhlo.backend_config"]["opaque"].value_bytes)
        for op in _operations(module.operation)
        if op.operation.name == "stablehlo.custom_call"
        and "opaque" in op.attributes["mhlo.backend_config"]
    ]


def _operations(operation) -> tp.Iterator[tp.Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from _operations(inner.operation)


def _kernel(compressed: bytes) -> Kernel:
    """Reads the launch that XLA is given: jaxlib's AnyKernelCall (triton.proto), compressed."""
    call = _fields(_fields(zlib.decompress(compressed))[1])
    kernel = _fields(call[1])
    return Kernel(kernel[1].decode(), kernel[2], kernel.get(3, 0), kernel[4].decode())


def _fields(message: bytes) -> dict:
    """Field number to value of an encoded protocol buffer; of repeated fields, the last."""
    values, at = {}, 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            values[key >> 3] = varint()
        else:
            size = varint() if key & 7 == 2 else 8 if key & 7 == 1 else 4
            values[key >> 3] = message[at : at + size]
            at += size
    return values


def assemble(kernel: Kernel, capability: int) -> dict:
    """Runs the assembler that Triton ships: registers, spills, shared memory, tensor-core use."""
    tools = pathlib.Path(str(triton.__file__)).parent / "backends/nvidia/bin"
    newest = tools / "ptxas-blackwell"
    tool = newest if capability >= 100 and newest.exists() else tools / "ptxas"
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    text = kernel.ptx
    with tempfile.TemporaryDirectory() as directory:
        ptx = pathlib.Path(directory) / "kernel.ptx"
        ptx.write_text(text)
        command = [tool, "-v", f"-arch={arch}", ptx, "-o", ptx.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kernel.name} for {arch}: {done.stderr}")
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return {
        "kernel": kernel.name,
        "capability": capability,
        "registers": int(re.findall(r"Used (\d+) registers", done.stderr)[-1]),
        "spills": sum(int(n) for pair in spilled for n in pair),
        "serialised": "serialized" in done.stderr,
        "shared": kernel.shared,
        "threads": int(re.findall(r"\.reqntid\s+(\d+)", text)[0]),
        "threads_launched": kernel.warps * 32,
        "wgmma": text.count("wgmma.mma_async"),
        "float8_products": len(re.findall(r"wgmma.mma_async\S*\.e4m3\.e4m3", text)),
        "tcgen05": text.count("tcgen05.mma"),
        "mma": text.count("mma.sync"),
        "tma_loads": text.count("cp.async.bulk.tensor"),
        "wgmma_in_flight": len(re.findall(r"wgmma.wait_group.sync.aligned [1-9]", text)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="*", type=int, default=[80, 90, 100])
    parser.add_argument("--json", help="write the table here")
    arguments = parser.parse_args()
    rows, seen = [], set()
    for capability in arguments.capabilities or [80, 90, 100]:
        cases = {**CASES, **(FLOAT8_CASES if capability >= 89 else {}), **KEPT}
        for name, case in cases.items():
            if name in ONLY and capability != ONLY[name]:
                continue
            lowered = (
                lower_float8 if name in FLOAT8_CASES else lower_kept if name in KEPT else lower
            )
            for kernel in lowered(case, capability):
                if kernel in seen:
                    continue
                seen.add(kernel)
                row = {"case": name, **assemble(kernel, capability)}
                rows.append(row)
                print(*(f"{k} {v}" for k, v in row.items()), sep="  ", flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows))
    over = [r for r in rows if r["shared"] > SHARED_LIMIT.get(r["capability"], 232_448)]
    sys.exit("shared memory past the chip's: " + str(over) if over else 0)


if __name__ == "__main__":
    main()

"""Compiles the fused kernel for TPU slices, each in a process of its own, and prints a table.

Needs no TPU: ``pip install 'moe-flax[tpu]'`` brings the compiler.

    python benchmarks/tpu_compile.py qwen3-30b-a3b:v6e:2x2:4:1024:bfloat16 ...
    python benchmarks/tpu_compile.py --grid --record cells.jsonl --minutes 60

A cell is preset:chip:slice:devices on the expert axis:tokens a device:weight dtype. ``--grid``
takes the whole table of docs/performance_tpu.md, most telling first. ``--record`` keeps every
cell's result, failures and timeouts too, and cells that it holds are not compiled again.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

MODELS = (
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "gpt-oss-120b",
    "glm-4.5-air",
    "qwen3-235b-a22b",
    "llama4-maverick",
    "deepseek-v3",
    "kimi-k2",
)
SLICES = (  # chip, slice, devices on the expert axis
    ("v6e", "2x2", 4),
    ("v5e", "2x2", 4),
    ("v5p", "2x2x1", 4),
    ("tpu7x", "2x2x1", 8),
    ("v6e", "4x4", 16),
    ("v6e", "8x8", 64),
    ("v5p", "4x4x4", 64),
    ("v6e", "16x16", 256),
    ("v5p", "8x8x4", 256),
)
HEADER = (
    "| model | slice | EP | tokens | weights | rows, hidden, features | VMEM MiB | receive MiB"
    " | temporaries MiB | compile s | CPU s | predicted us |"
)


def grid() -> list[str]:
    """All cells: each model at 256 tokens in bf16 first, slice by slice, then fp8, then others."""
    cells = [
        f"{model}:{chip}:{shape}:{devices}:{tokens}:{dtype}"
        for tokens, dtype in (
            (256, "bfloat16"),
            (256, "float8_e4m3fn"),
            (1024, "bfloat16"),
            (64, "bfloat16"),
            (8, "bfloat16"),
            (1024, "float8_e4m3fn"),
            (64, "float8_e4m3fn"),
            (8, "float8_e4m3fn"),
        )
        for chip, shape, devices in SLICES
        for model in MODELS
        if not (model == "mixtral-8x7b" and devices > 8)  # 8 experts
    ]
    return cells


def compile_one(cell: str) -> dict:
    """Compiles a cell in this process."""
    from moe_flax.compile_report import compile_report
    from moe_flax.config import MoEConfig
    from moe_flax.kernels.fused_ep.blocks import MIB

    name, chip, shape, devices, tokens, dtype = cell.split(":")
    start = time.process_time()
    report = compile_report(
        MoEConfig.preset(name),
        f"{chip}:{shape}",
        {"expert": int(devices)},
        tokens=int(tokens),
        weight_dtype=dtype,
    )
    blocks = report.blocks
    return {
        "blocks": [blocks.rows, blocks.hidden, blocks.features],
        "vmem_mib": sum(report.vmem.values()) / MIB,
        "receive_mib": report.hbm_scratch / MIB,
        "temporaries_mib": report.temporaries / MIB,
        "compile_s": report.compile_seconds,
        "cpu_s": time.process_time() - start,
        "predicted_us": 1e6 * report.fused.seconds,
    }


def run_cell(cell: str, timeout: float) -> dict:
    """Compiles a cell in a process of its own; says how it ended."""
    command = [sys.executable, __file__, "--child", cell]
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    ) as child:
        try:
            out, error = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return {"cell": cell, "error": f"not done after {timeout:.0f} s"}
    result = {"cell": cell, "wall_s": time.perf_counter() - start}
    if child.returncode:
        lines = [line for line in error.splitlines() if line.strip()]
        last = max((i for i, line in enumerate(lines) if "Error" in line), default=len(lines) - 1)
        message = " ".join(line.strip() for line in lines[last:]) or "no message"
        return result | {"error": f"exit {child.returncode}: {message[:600]}"}
    return result | json.loads(out.splitlines()[-1])


def row(result: dict) -> str:
    """A line of the table."""
    name, chip, shape, devices, tokens, dtype = result["cell"].split(":")
    cells = [name, f"{chip}:{shape}", devices, tokens, dtype]
    if "error" in result:
        cells += [result["error"].replace("|", "/")] + [""] * 6
    else:
        numbers = (
            "vmem_mib",
            "receive_mib",
            "temporaries_mib",
            "compile_s",
            "cpu_s",
            "predicted_us",
        )
        cells += [", ".join(map(str, result["blocks"]))]
        cells += [f"{result[number]:.0f}" for number in numbers]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cells", nargs="*", help="preset:chip:slice:devices:tokens:dtype")
    parser.add_argument("--grid", action="store_true", help="all cells of the documented table")
    parser.add_argument("--record", type=pathlib.Path, help="a file of JSON lines to go on from")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(compile_one(arguments.child)))
        return
    known = {}
    if arguments.record and arguments.record.exists():
        lines = arguments.record.read_text().splitlines()
        known = {result["cell"]: result for result in map(json.loads, lines)}
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}", flush=True)
    start = time.monotonic()
    for cell in arguments.cells + (grid() if arguments.grid else []):
        if cell not in known:
            if time.monotonic() - start > 60 * arguments.minutes:
                break
            known[cell] = run_cell(cell, arguments.timeout)
            if arguments.record:
                with arguments.record.open("a") as file:
                    file.write(json.dumps(known[cell]) + "\n")
        print(row(known[cell]), flush=True)


if __name__ == "__main__":
    main()

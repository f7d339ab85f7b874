"""Times `grouped_matmul` on CPU beside one dense product of the same FLOPs and `ragged_dot`.

    python benchmarks/grouped_matmul_cpu.py [--repeats 20] [--json FILE] [--markdown FILE]

Each case runs the forward product and both gradients together. The candidates of a case take
turns, so that what else the machine does falls on all of them alike; a ratio is one of medians
(and of minima). Temporaries are the compiler's own figure, beside inputs plus outputs.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import moe_flax.kernels.grouped_matmul as grouped

ROWS, K, N = 4096, 512, 256
LIMITS = {"forward": 2.5, "gradients": 3.0}
MEMORY_LIMIT = 2.0


def group_sizes(case: str, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes that sum to ROWS: even, random, skewed (Zipf), with half the groups empty, or one."""
    if case == "balanced":
        return np.full(groups, ROWS // groups, np.int32)
    chances = {
        "random": np.ones(groups),
        "skewed": 1 / np.arange(1, groups + 1),
        "half empty": (np.arange(groups) % 2 == 0).astype(float),
        "one group": (np.arange(groups) == groups // 2).astype(float),
    }[case]
    return rng.multinomial(ROWS, chances / chances.sum()).astype(np.int32)


def candidates(groups: int) -> dict[str, dict[str, tuple]]:
    """{"forward" | "gradients": {name: (function, arguments without sizes)}}."""
    rng = np.random.default_rng(0)
    lhs, matrices, grad = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, K), (groups, K, N), (ROWS, N))
    )
    products = {
        "ours": lambda x, w, sizes: grouped.grouped_matmul(x, w, sizes, backend="cpu"),
        "ragged_dot": jax.lax.ragged_dot,
        "dense": lambda x, w, sizes: x @ w,
    }

    def gradients(product):
        return lambda x, w, sizes, grad: jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](grad)

    weights = {"ours": matrices, "ragged_dot": matrices, "dense": matrices[0]}
    return {
        "forward": {name: (f, (lhs, weights[name]), ()) for name, f in products.items()},
        "gradients": {
            name: (gradients(f), (lhs, weights[name]), (grad,)) for name, f in products.items()
        },
    }


def measure(cases: list[str], experts: list[int], repeats: int) -> list[dict]:
    """One row a case: milliseconds, ratios to dense, and temporaries over inputs plus outputs."""
    rows = []
    for groups in experts:
        for kind, functions in candidates(groups).items():
            sizes = jnp.zeros(groups, jnp.int32)
            compiled = {
                name: jax.jit(f).lower(*before, sizes, *after).compile()
                for name, (f, before, after) in functions.items()
            }
            for case in tqdm(cases, desc=f"{kind}, E={groups}", leave=False):
                sizes = jnp.asarray(group_sizes(case, groups, np.random.default_rng(1)))
                calls = {
                    name: (compiled[name], (*before, sizes, *after))
                    for name, (_, before, after) in functions.items()
                }
                rows.append({"pass": kind, "E": groups, "case": case, **time_all(calls, repeats)})
    return rows


def time_all(calls: dict[str, tuple], repeats: int) -> dict:
    times = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, (function, arguments) in calls.items():
            if name == "ragged_dot" and repeat > 3:  # up to 100 times slower: three are enough
                continue
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if repeat:  # the first warms up
                times[name].append(time.perf_counter() - start)
    result = {f"{name}_ms": 1e3 * statistics.median(t) for name, t in times.items()}
    for name in ("ours", "ragged_dot"):
        result[f"{name}_ratio"] = result[f"{name}_ms"] / result["dense_ms"]
        memory = calls[name][0].memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        result[f"{name}_memory"] = memory.temp_size_in_bytes / held
    result["ours_ratio_of_minima"] = min(times["ours"]) / min(times["dense"])
    return result


def table(rows: list[dict]) -> str:
    columns = {
        "pass": "pass",
        "E": "E",
        "case": "case",
        "dense_ms": "dense ms",
        "ours_ms": "ours ms",
        "ours_ratio": "ours / dense",
        "ours_ratio_of_minima": "of minima",
        "ragged_dot_ratio": "ragged_dot / dense",
        "ours_memory": "ours temp / in+out",
        "ragged_dot_memory": "ragged_dot temp / in+out",
    }
    lines = ["| " + " | ".join(columns.values()) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (row[key] for key in columns)
        shown = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="grouped_matmul on CPU beside a dense product and ragged_dot"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    options = parser.parse_args()
    cases = ["balanced", "random", "skewed", "half empty", "one group"]
    rows = measure(cases, options.experts, options.repeats)
    text = table(rows)
    print(
        f"{ROWS} rows, products {K} x {N}, float32, jax {jax.__version__}, {os.cpu_count()} cores"
    )
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    missed = [
        row
        for row in rows
        if row["ours_ratio"] > LIMITS[row["pass"]] or row["ours_memory"] > MEMORY_LIMIT
    ]
    print(f"past the limits {LIMITS}, memory {MEMORY_LIMIT}: {len(missed)} of {len(rows)} cases")


if __name__ == "__main__":
    main()

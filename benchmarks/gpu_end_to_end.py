"""The whole layer on one GPU, from x, beside its routed half alone; and what it launches.

    python benchmarks/gpu_end_to_end.py [--preset NAME] [--tokens 16 256 4096] [--json FILE]

The layer: router, top-k, sort, gate/up product, activation, down product, weighted sum. The routed
half starts from the experts' ids and weights. Both are compiled by XLA under its default flags.
"""

import argparse
import json
import re

import jax
import jax.numpy as jnp
from flax import nnx
from gpu_layer import time_calls

import moe_flax
from moe_flax.experts import expert_ffn

# Instructions that launch nothing by themselves.
_SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


def launches(hlo: str) -> list[str]:
    """The kernels, copies and library calls that a compiled program runs, by name.

    Args:
      hlo: the text of a compiled program. Command buffers are computations that the entry calls.
    """
    bodies: dict[str, list[str]] = {}
    entry = ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            body = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        elif bodies:
            body.append(line)
    names, pending = [], [entry]
    while pending:
        for line in bodies[pending.pop()]:
            found = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([a-z-]+)\(", line)
            if found and found[2] == "call":
                pending += re.findall(r"to_apply=%?([\w.-]+)", line)
            elif found and found[2] not in _SILENT:
                names.append(found[1])
    return names


def measure(preset: str, tokens: int) -> dict:
    """Times the layer and its routed half on fresh random weights."""
    config = moe_flax.MoEConfig.preset(preset)
    with jax.default_matmul_precision("default"):
        layer = moe_flax.MoE.from_config(
            config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        definition, state = nnx.split(layer)
        x = jax.random.normal(jax.random.key(0), (tokens, config.features), jnp.bfloat16)

        def whole(state, x):
            return nnx.merge(definition, state)(x)

        def chosen(state, x):
            layer = nnx.merge(definition, state)
            return moe_flax.route(layer.router(x), config.router, config.num_experts_per_token)

        routing = jax.jit(chosen)(state, x)

        def routed(state, x, ids, weights):
            layer = nnx.merge(definition, state)
            return expert_ffn(
                x, layer.experts.wi[...], layer.experts.wo[...], moe_flax.Routing(ids, weights)
            )

        programs = {
            "layer": (jax.jit(whole), (state, x)),
            "routed half": (jax.jit(routed), (state, x, routing.expert_ids, routing.weights)),
        }
        row: dict = {"preset": preset, "tokens": tokens}
        for name, (function, arguments) in programs.items():
            compiled = function.lower(*arguments).compile()
            row[f"{name} launches"] = launches(compiled.as_text())
            row[f"{name} ms"] = time_calls(
                lambda c=compiled, a=arguments: c(*a), jax.block_until_ready
            )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 4096])
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    rows = [measure(arguments.preset, tokens) for tokens in arguments.tokens]
    for row in rows:
        ours, half = row["layer ms"], row["routed half ms"]
        print(
            f"{row['preset']} {row['tokens']:6} layer {ours:.3f} ms, routed half {half:.3f},"
            f" {ours / half:.2f}; launches {len(row['layer launches'])} and"
            f" {len(row['routed half launches'])}: {' '.join(row['layer launches'])}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

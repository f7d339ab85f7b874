"""Compiles the fused kernel for TPU slices and prints a table: VMEM, HBM, compile and run time.

Needs no TPU: ``pip install 'moe-flax[tpu]'`` brings the compiler.

    python benchmarks/tpu_compile.py qwen3-30b-a3b:v6e:2x2:4:1024:bfloat16 ...

Each argument is model:chip:slice:devices on the expert axis:tokens a device:weight dtype.
"""

import sys

from moe_flax.compile_report import compile_report
from moe_flax.config import MoEConfig
from moe_flax.kernels.fused_ep.blocks import MIB

MODELS = {  # E, K, D, F
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "deepseek-v3": (256, 8, 7168, 2048),
    "kimi-k2": (384, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "llama4-maverick": (128, 1, 5120, 8192),
    "glm-4.5-air": (128, 8, 4096, 1408),
}


def config(name: str) -> MoEConfig:
    """The sizes of a model's experts; gpt-oss has its own activation and biases."""
    experts, k, features, hidden = MODELS[name]
    oss = name.startswith("gpt-oss")
    return MoEConfig(
        features=features,
        hidden_features=hidden,
        num_experts=experts,
        num_experts_per_token=k,
        activation="gpt_oss" if oss else "silu",
        use_bias=oss,
    )


def main(arguments: list[str]) -> None:
    print("| model | slice | EP | tokens | weights | rows, hidden, features | VMEM MiB |", end="")
    print(" receive MiB | temporaries MiB | compile s | predicted us |")
    print("|" + "---|" * 11)
    for argument in arguments:
        name, chip, shape, devices, tokens, dtype = argument.split(":")
        try:
            report = compile_report(
                config(name),
                f"{chip}:{shape}",
                {"expert": int(devices)},
                tokens=int(tokens),
                weight_dtype=dtype,
            )
        except Exception as error:
            print(f"| {name} | {chip}:{shape} | {devices} | {tokens} | {dtype} | {error!s:.300} |")
            continue
        blocks = report.blocks
        print(
            f"| {name} | {chip}:{shape} | {devices} | {tokens} | {dtype} |"
            f" {blocks.rows}, {blocks.hidden}, {blocks.features} |"
            f" {sum(report.vmem.values()) / MIB:.0f} | {report.hbm_scratch / MIB:.0f} |"
            f" {report.temporaries / MIB:.0f} | {report.compile_seconds:.0f} |"
            f" {1e6 * report.fused.seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""The ``moe-flax`` command."""

import argparse
import pathlib
import re
import sys
import typing as tp

import jax
import jax.numpy as jnp
import tqdm

from moe_flax import bench
from moe_flax.checkpoint.encode import SCHEMES
from moe_flax.checkpoint.errors import CheckpointError, fault
from moe_flax.checkpoint.inspect import inspect, size
from moe_flax.checkpoint.orbax import from_orbax, write_orbax
from moe_flax.checkpoint.source import open_source
from moe_flax.checkpoint.transform import beyond_line, plan
from moe_flax.config import MoEConfig


class CommandError(ValueError):
    """What a command was asked for cannot be done; the message says why."""


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 800MB or 1000")
    return int(match[1]) * _UNITS[match[2]]


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if not name.isidentifier() or not number or name in axes:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh; write axis=size, each axis once: data=2,expert=8"
            )
        axes[name] = _count(number)
    return axes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moe-flax", description="MoE layers and checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)

    shown = commands.add_parser("inspect", help="say what a checkpoint holds")
    shown.add_argument("path", type=pathlib.Path, help="its directory")
    shown.set_defaults(run=_inspect)

    made = commands.add_parser("convert", help="write a checkpoint in another form")
    made.add_argument("source", type=pathlib.Path, help="the directory to read")
    made.add_argument("target", type=pathlib.Path, help="the directory to write")
    made.add_argument("--to", choices=("safetensors", "orbax"), default="safetensors")
    made.add_argument("--from-orbax", action="store_true", help="source is what --to orbax wrote")
    made.add_argument("--family", help="model type to write (default: its own)")
    made.add_argument("--form", help="on-disk form to write, such as fused (default: its own)")
    made.add_argument("--dtype", choices=sorted(_DTYPES), help="of matrices, the router's apart")
    made.add_argument("--quantize", choices=sorted(SCHEMES), help="the experts' matrices")
    made.add_argument("--shard-size", type=_bytes, default=_bytes("5GB"), help="such as 5GB")
    made.add_argument("--dry-run", action="store_true", help="print the mapping, write nothing")
    made.set_defaults(run=_convert)

    tried = commands.add_parser(
        "compile", help="compile a layer for TPUs that are not there: what it needs and should take"
    )
    tried.add_argument("model", help="a preset, or a config.json or its directory")
    tried.add_argument("--topology", required=True, help="such as v6e:4x4")
    tried.add_argument("--mesh", type=_mesh, required=True, help="such as data=2,expert=8")
    tried.add_argument("--tokens", type=_count, default=1024, help="of one device (default: 1024)")
    tried.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    tried.add_argument(
        "--experts-only",
        action="store_true",
        help="without router and shared experts; quantised weights always are",
    )
    tried.set_defaults(run=_compile)
    bench.add_command(commands)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    print("\n".join(inspect(arguments.path)))


def _bar(total: int | None) -> tqdm.tqdm:
    return tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="convert")


def _refuse(arguments: argparse.Namespace, reason: str, *names: str) -> None:
    """An option that would be passed over is an error."""
    given = [name for name in names if getattr(arguments, name) not in (None, False)]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise fault(f"{options} cannot be used with {reason}")


def _convert(arguments: argparse.Namespace) -> None:
    if arguments.from_orbax:
        _refuse(arguments, "--from-orbax", "dtype", "quantize", "dry_run")
        if arguments.to == "orbax":
            raise fault("--to orbax cannot be used with --from-orbax")
    elif arguments.to == "orbax":
        reason = "--to orbax, which holds the layers in this library's own layout"
        _refuse(arguments, reason, "family", "form", "quantize")
    target: dict[str, tp.Any] = {"family": arguments.family, "form": arguments.form}
    if arguments.from_orbax:
        with _bar(None) as bar:
            from_orbax(
                arguments.source,
                arguments.target,
                **target,
                shard_bytes=arguments.shard_size,
                progress=bar.update,
            )
        return
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
    source = open_source(arguments.source)
    planned = plan(source, **target, dtype=dtype, scheme=arguments.quantize)
    if arguments.dry_run:
        print("\n".join(planned.describe(orbax=arguments.to == "orbax")))
        print(f"writes {size(planned.nbytes)} in {len(planned.outputs)} tensors; nothing written")
        return
    if source.beyond:
        print(f"moe-flax: {beyond_line(source)}", file=sys.stderr)
    with _bar(planned.nbytes) as bar:
        if arguments.to == "orbax":
            write_orbax(
                arguments.target,
                source,
                dtype=dtype,
                fingerprint=planned.fingerprint,
                progress=bar.update,
            )
        else:
            planned.write(arguments.target, shard_bytes=arguments.shard_size, progress=bar.update)
    for layer, error in planned.errors.relative().items():
        print(f"layer {layer}: relative error of {arguments.quantize} {error:.3g}")
    if arguments.quantize and not planned.errors.total:
        print("relative errors are not known: a run before, cut off at its end, has measured them")


def _compile(arguments: argparse.Namespace) -> None:
    jax.config.update("jax_platforms", "cpu")  # libtpu is to compile, not to look for a TPU
    from moe_flax import compile_report as report  # imports Pallas for TPU

    quantized = arguments.dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
    try:
        there = pathlib.Path(arguments.model).exists()
        config = (MoEConfig.from_hf if there else MoEConfig.preset)(arguments.model)
        done = report.compile_report(
            config,
            arguments.topology,
            arguments.mesh,
            tokens=arguments.tokens,
            weight_dtype=arguments.dtype,
            part="experts" if arguments.experts_only or quantized else "layer",
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    print(done)


def main(argv: tp.Sequence[str] | None = None) -> int:
    """Runs the command; what is wrong with its input goes to stderr and gives exit status 1."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (CheckpointError, CommandError) as error:
        print(f"moe-flax: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

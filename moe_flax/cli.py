"""The ``moe-flax`` command."""

import argparse
import pathlib
import re
import sys
import typing as tp

import jax.numpy as jnp
import tqdm

from moe_flax import bench
from moe_flax.checkpoint.encode import SCHEMES
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.inspect import inspect, size
from moe_flax.checkpoint.orbax import from_orbax, write_orbax
from moe_flax.checkpoint.source import open_source
from moe_flax.checkpoint.transform import plan

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 800MB or 1000")
    return int(match[1]) * _UNITS[match[2]]


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
    bench.add_command(commands)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    print("\n".join(inspect(arguments.path)))


def _bar(total: int | None) -> tqdm.tqdm:
    return tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="convert")


def _convert(arguments: argparse.Namespace) -> None:
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
        print("\n".join(planned.describe()))
        print(f"writes {size(planned.nbytes)} in {len(planned.outputs)} tensors; nothing written")
        return
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
    for layer, (error, weight) in sorted(planned.errors.items()):
        if weight:
            relative = (error / weight) ** 0.5
            print(f"layer {layer}: relative error of {arguments.quantize} {relative:.3g}")


def main(argv: tp.Sequence[str] | None = None) -> int:
    """Runs the command; errors in a checkpoint go to stderr and give exit status 1."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except CheckpointError as error:
        print(f"moe-flax: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

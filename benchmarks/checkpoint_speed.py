"""How fast a checkpoint converts, beside a plain copy of its files on the same disk, in one run.

    python benchmarks/checkpoint_speed.py --gigabytes 6 --directory /tmp

Makes a synthetic bfloat16 Qwen3-MoE checkpoint, copies its files (with fsync, as the converter
does), rewrites it in its own form, in the fused one, as Orbax and from there back, and loads one
layer into our layout. Peak host memory is the process' own, beyond what it had before, file pages
apart.
"""

import argparse
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time

import ml_dtypes
import numpy as np

from moe_flax.checkpoint import load_parameters
from moe_flax.checkpoint.orbax import from_orbax, write_orbax
from moe_flax.checkpoint.source import open_source
from moe_flax.checkpoint.transform import plan
from moe_flax.checkpoint.writer import Output, write_checkpoint

D, F, E = 2048, 768, 128


def make(path: pathlib.Path, gigabytes: float) -> int:
    """Writes the checkpoint; returns its bytes."""
    layers = max(1, round(gigabytes * 1e9 / (E * 3 * D * F * 2)))
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 1 << 16, F * D, dtype=np.uint16) & 0x3FFF
    bf16 = np.dtype(ml_dtypes.bfloat16)

    def output(name: str, *shape: int) -> Output:
        def chunks() -> list[np.ndarray]:
            return [np.resize(noise, int(np.prod(shape))).view(bf16).reshape(shape)]

        return Output(name, bf16, shape, chunks)

    outputs = []
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp."
        outputs.append(output(f"{block}gate.weight", E, D))
        for e in range(E):
            for name in ("gate_proj", "up_proj"):
                outputs.append(output(f"{block}experts.{e}.{name}.weight", F, D))
            outputs.append(output(f"{block}experts.{e}.down_proj.weight", D, F))
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": D,
        "moe_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "norm_topk_prob": True,
    }
    files = {"config.json": json.dumps(config).encode()}
    write_checkpoint(path, outputs, files, shard_bytes=2 * 10**9)
    return sum(output.nbytes for output in outputs)


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies every file by reading and writing, and waits for the disk."""
    target.mkdir()
    for file in source.iterdir():
        with open(file, "rb") as read, open(target / file.name, "wb") as write:
            shutil.copyfileobj(read, write, 1 << 24)
            write.flush()
            os.fsync(write.fileno())


def anonymous() -> int:
    """Bytes of memory that are the process' own, files mapped not counted."""
    with open("/proc/self/status") as handle:
        found = [line.split()[1] for line in handle if line.startswith("RssAnon")]
    return int(found[0]) * 1024


class Peak:
    """The highest `anonymous` while the block runs, beyond where it began."""

    def __enter__(self) -> "Peak":
        self.start = self.top = anonymous()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.02):
            self.top = max(self.top, anonymous())

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.bytes = self.top - self.start


def main() -> None:
    """Runs it and prints a table."""
    parser = argparse.ArgumentParser(description="Conversion speed beside a copy.")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        root = pathlib.Path(temporary)
        total = make(root / "source", arguments.gigabytes)
        layer_bytes = E * 3 * D * F * 2
        print(f"{total / 1e9:.2f} GB, one layer's experts {layer_bytes / 1e9:.2f} GB")
        rates = {}

        def measure(label: str, run) -> None:
            start = time.perf_counter()
            with Peak() as peak:
                run()
            seconds = time.perf_counter() - start
            rates[label] = total / seconds / 1e9
            print(f"{label:<22} {rates[label]:6.2f} GB/s   peak {peak.bytes / 1e9:5.2f} GB")

        for turn in (1, 2):
            measure(f"copy ({turn})", lambda: copy(root / "source", root / "copy"))
            shutil.rmtree(root / "copy")
        source = open_source(root / "source")
        for form in ("per_expert", "fused"):
            measure(f"convert to {form}", lambda f=form: plan(source, form=f).write(root / "out"))
            shutil.rmtree(root / "out")
        measure("convert to orbax", lambda: write_orbax(root / "out", source, fingerprint="once"))
        measure("convert from orbax", lambda: from_orbax(root / "out", root / "back"))
        shutil.rmtree(root / "out")
        shutil.rmtree(root / "back")
        start = time.perf_counter()
        load_parameters(root / "source", 0)
        seconds = time.perf_counter() - start
        print(f"load one layer         {layer_bytes / seconds / 1e9:6.2f} GB/s")
        base = max(rates["copy (1)"], rates["copy (2)"])
        for label in [label for label in rates if label.startswith("convert")]:
            print(f"{label}: {rates[label] / base:.2f} of the copy's speed")


if __name__ == "__main__":
    main()

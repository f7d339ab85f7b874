"""Two processes load one checkpoint onto one mesh: each reads the bytes of its own shards alone."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden import write

from moe_flax import checkpoint

D, F, E, LAYERS = 256, 512, 16, 2
WORKER = """
    import json, sys
    import jax, numpy as np
    from jax.experimental import multihost_utils

    path, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    from flax import nnx
    from moe_flax import checkpoint
    from moe_flax.checkpoint.mapping import Binding
    from moe_flax.checkpoint.modules import named_variables

    taken = {}  # key: bytes that were taken out of it
    block = Binding.block

    class Slices:
        def __init__(self, array, key):
            self.array, self.key = array, key

        def __getitem__(self, index):
            part = self.array[index]
            taken[self.key] = taken.get(self.key, 0) + part.nbytes
            return part

    def watched(self, tensors, expert, branch):
        return Slices(block(self, tensors, expert, branch), self.key(expert, branch))

    Binding.block = watched
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    loaded = checkpoint.load(path, mesh=mesh)

    mapped, inside = 0, False  # pages of the file that this process has touched
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            inside = line.rstrip().endswith("model.safetensors")
        elif inside and line.startswith("Rss:"):
            mapped += int(line.split()[1]) * 1024

    held = {}
    for index, layer in loaded.layers.items():
        for name, variable in named_variables(layer):
            array = variable[...]
            shards = [np.asarray(s.data).astype(np.float32).sum() for s in array.addressable_shards]
            held[f"{index}.{name}"] = {
                "local": [list(s.data.shape) for s in array.addressable_shards],
                "sums": [float(s) for s in shards],
            }
    rows = np.random.default_rng(1).normal(size=(8, loaded.config.features)).astype(np.float32)
    layer = loaded.layers[0]
    layer.backend = "reference"
    with jax.set_mesh(mesh):
        out = nnx.jit(lambda layer, x: layer(x))(layer, rows)
    out = np.asarray(multihost_utils.process_allgather(out, tiled=True))
    print(json.dumps({"taken": taken, "mapped": mapped, "held": held, "out": out.tolist()}))
"""


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def make(path):
    """A Mixtral with 2 layers of 16 experts, in bfloat16: 25 MB."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(50, D))}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.block_sparse_moe."
        tensors[f"{block}gate.weight"] = rng.normal(size=(E, D))
        for e in range(E):
            for name, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):
                tensors[f"{block}experts.{e}.{name}.weight"] = rng.normal(size=shape) / D**0.5
    config = {
        "model_type": "mixtral", "hidden_size": D, "intermediate_size": F, "num_local_experts": E,
        "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
    }  # fmt: skip
    return write(path, {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, config)


@pytest.mark.slow
def test_each_process_reads_its_own_experts(tmp_path):
    path = make(tmp_path / "m")
    environment = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(path), f"localhost:{free_port()}"]
    running = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    try:
        ended = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, problem) in zip(running, ended, strict=True):
        assert process.returncode == 0, problem
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in ended)

    expert_bytes = LAYERS * E * 3 * D * F * 2
    for process, found in enumerate((first, second)):
        experts = {k: n for k, n in found["taken"].items() if ".experts." in k}
        mine = range(process * E // 2, (process + 1) * E // 2)
        assert {int(k.split("experts.")[1].split(".")[0]) for k in experts} == set(mine)
        assert sum(experts.values()) == expert_bytes // 2  # every byte of its own, once
        # What the kernel mapped for it: its half, the routers, and pages around them.
        assert expert_bytes // 2 <= found["mapped"] < 0.75 * expert_bytes
        for name, held in found["held"].items():
            assert [shape[0] for shape in held["local"]] == [E // 2 if "experts" in name else D]

    alone = checkpoint.load(path)
    wi = np.asarray(alone.layers[1].experts.wi[...], np.float32)
    halves = wi[: E // 2].sum(), wi[E // 2 :].sum()
    for found, half in zip((first, second), halves, strict=True):
        np.testing.assert_allclose(found["held"]["1.experts.wi"]["sums"], [half], rtol=1e-3)
    rows = np.random.default_rng(1).normal(size=(8, D)).astype(np.float32)
    layer = alone.layers[0]
    layer.backend = "reference"
    expected = np.asarray(layer(jnp.asarray(rows)))
    for found in (first, second):
        error = np.linalg.norm(np.array(found["out"]) - expected) / np.linalg.norm(expected)
        assert error < 1e-5

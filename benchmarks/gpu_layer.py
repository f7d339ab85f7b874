"""The routed half of a MoE layer on one GPU: ours beside torch, forward and training, in one run.

    python benchmarks/gpu_layer.py [--json FILE] [--seconds N] [--train] [--bursts]
        [--peer-python PYTHON]

Forward: top-k of given logits, sort, gate/up product, SwiGLU, down product, weighted sum. Ours runs
under XLA's default flags; torch is `grouped_mm` under `torch.compile`, replayed as a CUDA graph, in
a process of its own; `time_calls` says how both are timed. The floor is the larger of the
operations over 790 TFLOP/s and the bytes over 4.3 TB/s, with the experts counted that are hit.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import time
import typing

MODELS = {  # E, K, D, F
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3-ep8": (32, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "llama4-scout": (16, 1, 5120, 8192),
}
TOKENS = (16384, 4096, 256, 16)
TRAIN = {
    "mixtral-8x7b": 16384,
    "qwen3-30b-a3b": 16384,
    "deepseek-v3-ep8": 8192,
    "gpt-oss-120b": 16384,
}


def cells(train: bool) -> list[tuple[str, int, bool]]:
    """(model, tokens, whether with gradients), in the order they are measured."""
    trained = [(m, t, True) for m, t in TRAIN.items()] if train else []
    return trained + [(m, t, False) for m in MODELS for t in TOKENS]


def floor_ms(model: str, tokens: int, train: bool, hit: int) -> float:
    """The least time a forward can take, three times that with gradients."""
    _, top_k, features, hidden = MODELS[model]
    operations = 6 * tokens * top_k * features * hidden / 790e12
    moved = (hit * 3 * features * hidden * 2 + 2 * tokens * features * 2) / 4.3e12
    return 1e3 * max(operations, moved) * (3 if train else 1)


def export_ours(cell: tuple[str, int, bool]) -> bytes:
    """Lowers our layer for the GPU in a process without one: lowering fills the CPU's cores."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import jax_triton

    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import ffn, launch

    model, tokens, train = cell
    experts, top_k, features, hidden = MODELS[model]

    def forward(x, logits, wi, wo):
        scores, ids = jax.lax.top_k(logits, top_k)
        call = ffn.make_call(Activation(), x, wi, ids)
        return ffn.routed_ffn(call, x, wi, wo, None, None, ids, jax.nn.softmax(scores))

    def training(x, logits, wi, wo):
        y, pull = jax.vjp(forward, x, logits, wi, wo)
        return y, pull(x)

    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((tokens, features), jnp.bfloat16),
        shape((tokens, experts), jnp.float32),
        shape((experts, 2, features, hidden), jnp.bfloat16),
        shape((experts, hidden, features), jnp.bfloat16),
    )
    check = jax.export.DisabledSafetyCheck.custom_call(jax_triton.CUSTOM_CALL_TARGET_NAME)
    with launch.compile_for(90):
        exported = jax.export.export(
            jax.jit(training if train else forward), platforms=("cuda",), disabled_checks=[check]
        )(*arguments)
    return bytes(exported.serialize())


def time_calls(call, wait, bursts: bool = False) -> float:
    """Median milliseconds a call: of three rounds of 0.1 s, or of five bursts of 10 ms.

    A GPU that multiplies without a pause draws all the power it may and slows down, by up to a
    quarter within a second; one that was idle starts slowly. The ceilings that the floor counts
    with were measured in bursts. With `bursts`, pauses come first, then 15 ms of calls to leave the
    idle state, then the timed ones.
    """
    for _ in range(2):
        wait(call())
    start = time.perf_counter()
    wait(call())
    once = time.perf_counter() - start
    calls = max(1 if bursts else 3, min(200, int((0.01 if bursts else 0.1) / max(once, 2e-5))))
    times = []
    for _ in range(5 if bursts else 3):
        if bursts:
            time.sleep(max(0.06, 4 * calls * once))
            for _ in range(max(1, calls * 3 // 2)):
                out = call()
            wait(out)
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        wait(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return sorted(times)[len(times) // 2]


def run_ours(chosen: list[tuple[str, int, bool]], deadline: float, bursts: bool) -> list[dict]:
    """Measures our layer in every cell."""
    context = multiprocessing.get_context("spawn")
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    os.environ["JAX_PLATFORMS"] = "cpu"
    pool = concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 3), context)
    pending = [pool.submit(export_ours, cell) for cell in chosen]
    os.environ["JAX_PLATFORMS"] = platforms
    import jax
    import jax.numpy as jnp

    rows = []
    for (model, tokens, train), future in zip(chosen, pending, strict=True):
        experts, top_k, features, hidden = MODELS[model]
        if time.time() > deadline:
            break
        exported = jax.export.deserialize(bytearray(future.result()))
        keys = jax.random.split(jax.random.key(0), 4)

        @jax.jit
        def make(keys, tokens=tokens, experts=experts, features=features, hidden=hidden):
            def normal(key, shape, scale, dtype=jnp.bfloat16):
                return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

            return (
                normal(keys[0], (tokens, features), 1.0),
                normal(keys[1], (tokens, experts), 1.0, jnp.float32),
                normal(keys[2], (experts, 2, features, hidden), features**-0.5),
                normal(keys[3], (experts, hidden, features), hidden**-0.5),
            )

        arguments = make(keys)
        hit = len(set(jax.lax.top_k(arguments[1], top_k)[1].ravel().tolist()))
        compiled = jax.jit(exported.call).lower(*arguments).compile()
        memory: typing.Any = compiled.memory_analysis()
        row = {"model": model, "tokens": tokens, "train": train, "hit": hit}
        row["ours"] = time_calls(lambda: compiled(*arguments), jax.block_until_ready, bursts)  # noqa: B023
        row["ours_gib"] = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**30
        row["floor"] = floor_ms(model, tokens, train, hit)
        rows.append(row)
        print("ours", json.dumps(row), flush=True)
        del arguments, compiled
    for process in list(pool._processes.values()):
        process.kill()
    return rows


def run_torch(chosen: list[tuple[str, int, bool]], deadline: float, bursts: bool) -> None:
    """Measures torch's compiled layer; prints a JSON line for each cell."""
    import torch
    import torch.nn.functional as F

    def layer(x, logits, w13, w2, top_k):
        scores, ids = torch.topk(logits, top_k)
        weights = torch.softmax(scores, -1)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        experts = torch.arange(w13.shape[0], device=x.device)
        ends = torch.searchsorted(flat[order], experts, right=True).to(torch.int32)
        rows = x[order // top_k]
        h = F.grouped_mm(rows, w13, offs=ends)
        gate, up = h.chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, w2, offs=ends)
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=x.device)
        )
        y = y[inverse].view(x.shape[0], top_k, -1)
        return (y * weights[:, :, None]).sum(1).to(x.dtype)

    compiled: typing.Any = torch.compile(layer, dynamic=False)
    torch._dynamo.config.cache_size_limit = 64
    for model, tokens, train in chosen:
        if time.time() > deadline:
            break
        experts, top_k, features, hidden = MODELS[model]
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        x = torch.randn(tokens, features, **options)
        logits = torch.randn(tokens, experts, device="cuda")
        w13 = torch.randn(experts, features, 2 * hidden, **options) * features**-0.5
        w2 = torch.randn(experts, hidden, features, **options) * hidden**-0.5
        leaves = [x, logits, w13, w2]
        for leaf in leaves:
            leaf.requires_grad_(train)

        def step():
            y = compiled(*leaves, top_k)  # noqa: B023
            if train:  # noqa: B023
                return torch.autograd.grad(y, leaves, x.detach())  # noqa: B023
            return y

        row = {"model": model, "tokens": tokens, "train": train}
        try:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            row["torch_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            run = step
            if not train:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            row["torch"] = time_calls(run, lambda _: torch.cuda.synchronize(), bursts)
        except Exception as error:
            row["torch_error"] = repr(error)[:300]
        print(json.dumps(row), flush=True)
        del x, logits, w13, w2, leaves
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--seconds", type=float, default=600, help="start no cell later than this")
    parser.add_argument("--train", action="store_true", help="also forward and backward")
    parser.add_argument("--bursts", action="store_true", help="bursts with pauses; see time_calls")
    parser.add_argument("--peer-python", help="a Python that has torch; without it ours runs alone")
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deadline = time.time() + arguments.seconds
    if arguments.torch:
        run_torch(cells(arguments.train), deadline, arguments.bursts)
        return
    rows = run_ours(cells(arguments.train), deadline, arguments.bursts)
    if arguments.peer_python:
        command = [arguments.peer_python, __file__, "--torch"]
        command += ["--seconds", str(deadline - time.time())]
        command += ["--train"] if arguments.train else []
        command += ["--bursts"] if arguments.bursts else []
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean)
        for line in peer.stdout or ():
            found = json.loads(line)
            for row in rows:
                if all(row[k] == found[k] for k in ("model", "tokens", "train")):
                    row.update(found)
    for row in rows:
        ratio = f"{row['torch'] / row['ours']:6.2f}" if "torch" in row else ""
        print(
            f"{row['model']:17}{row['tokens']:6} {'train' if row['train'] else '':5}"
            f" floor {row['floor']:7.3f}  ours {row['ours']:7.3f}"
            f" ({row['floor'] / row['ours']:.2f})"
            f"  torch {row.get('torch', float('nan')):7.3f}  {ratio}"
            f"  GiB {row['ours_gib']:.2f} / {row.get('torch_gib', float('nan')):.2f}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

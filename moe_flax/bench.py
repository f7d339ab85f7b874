"""``moe-flax bench``: the routed half of a layer on this machine, beside what else is installed."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import time
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from moe_flax import bench_peers
from moe_flax.bench_peers import Candidate, Problem
from moe_flax.config import MoEConfig
from moe_flax.experts import expert_ffn
from moe_flax.kernels.backend import BACKENDS, resolve_backend
from moe_flax.routing import Routing

PASSES = ("forward", "training")
_OURS = "moe_flax"
_WINDOW = 0.05  # seconds of calls behind one time
_MOST_CALLS = 100
_PICTURES = (".png", ".pdf", ".svg")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer's sizes: E experts, K a token, D features, F hidden features."""

    experts: int
    top_k: int
    features: int
    hidden: int

    def __str__(self) -> str:
        return f"E={self.experts}, K={self.top_k}, D={self.features}, F={self.hidden}"


@dataclasses.dataclass(frozen=True)
class Rates:
    """What this machine reaches: dense products in operations, copies in bytes, a second each."""

    operations: float
    bytes: float

    def floor(self, sizes: Sizes, tokens: int, hit: int, itemsize: int, train: bool) -> float:
        """The least seconds a pass can take.

        Args:
          sizes: of the layer.
          tokens: T.
          hit: experts that have a token; the matrices of the others need not be read.
          itemsize: bytes of an element.
          train: forward and backward, three times the products, reads and writes.
        """
        moved = hit * 3 * sizes.features * sizes.hidden + 2 * tokens * sizes.features
        least = max(operations(sizes, tokens) / self.operations, moved * itemsize / self.bytes)
        return least * (3 if train else 1)


@dataclasses.dataclass(frozen=True)
class Time:
    """One line of the table.

    Attributes:
      name: "moe_flax" or one of `bench_peers.PEERS`.
      work: one of `PASSES`.
      tokens: T.
      ms: median milliseconds of a pass.
      tflops: 10^12 operations a second.
      floor: the machine's floor over the time; 1 is the best that can be.
    """

    name: str
    work: str
    tokens: int
    ms: float
    tflops: float
    floor: float


def operations(sizes: Sizes, tokens: int) -> int:
    """Multiplications and additions of a forward pass."""
    return 6 * tokens * sizes.top_k * sizes.features * sizes.hidden


def make_problem(sizes: Sizes, tokens: int, dtype: str, seed: int = 0) -> Problem:
    """Random operands with outputs of order 1, and K different random experts a token."""
    keys = jax.random.split(jax.random.key(seed), 4)
    e, k, d, f = dataclasses.astuple(sizes)

    @jax.jit
    def draw():
        scores, ids = jax.lax.top_k(jax.random.normal(keys[3], (tokens, e)), k)
        return Problem(
            jax.random.normal(keys[0], (tokens, d), dtype),
            jax.random.normal(keys[1], (e, 2, d, f), dtype) * d**-0.5,
            jax.random.normal(keys[2], (e, f, d), dtype) * f**-0.5,
            ids.astype(jnp.int32),
            jax.nn.softmax(scores),
        )

    return draw()


def our_layer(backend: str, tokens, wi, wo, ids, weights) -> jax.Array:
    """`expert_ffn` with the operands of a `Problem`."""
    return expert_ffn(tokens, wi, wo, Routing(ids, weights), backend=backend)


def measure_rates(dtype: str, repeats: int, on_cpu: bool) -> Rates:
    """Times a large copy and a large dense product."""
    side, elements = (1024, 2**24) if on_cpu else (8192, 2**28)
    source = jnp.ones(elements, jnp.float32)
    matrix = jnp.ones((side, side), dtype)
    add = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=a.dtype))
    times = interleave(
        {
            "copy": Candidate(lambda: add(source), jax.block_until_ready),
            "product": Candidate(lambda: product(matrix), jax.block_until_ready),
        },
        repeats,
    )
    return Rates(2 * side**3 / times["product"], 2 * source.nbytes / times["copy"])


def interleave(candidates: tp.Mapping[str, Candidate], repeats: int) -> dict[str, float]:
    """Median seconds of a call: each repetition times every candidate once, in turn."""
    calls = {}
    for name, candidate in candidates.items():
        candidate.wait(candidate.run())
        start = time.perf_counter()
        candidate.wait(candidate.run())
        once = max(time.perf_counter() - start, 1e-6)
        calls[name] = max(1, min(_MOST_CALLS, int(_WINDOW / once)))
    times = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            out = None
            for _ in range(calls[name]):
                out = candidate.run()
            candidate.wait(out)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def measure(
    sizes: Sizes,
    tokens: int,
    work: str,
    *,
    dtype: str,
    backend: str,
    peers: tp.Sequence[str],
    rates: Rates,
    repeats: int,
    say: tp.Callable[[str], None] = print,
) -> list[Time]:
    """Times ours and the peers on one problem.

    Args:
      sizes: of the layer.
      tokens: T.
      work: "forward", or "training" for forward and backward.
      dtype: of tokens and matrices.
      backend: ours, as for `moe_flax.expert_ffn`.
      peers: of `bench_peers.PEERS`, all of them present.
      rates: what the floor is computed from.
      repeats: repetitions, of which the median counts.
      say: takes a line for each peer that fails.
    """
    train = work == "training"
    problem = make_problem(sizes, tokens, dtype)
    candidates = {
        _OURS: bench_peers.jax_candidate(functools.partial(our_layer, backend), problem, train)
    }
    for name in peers:
        try:
            candidate = bench_peers.make(name, problem, train)
            candidate.wait(candidate.run())
        except Exception as error:  # a peer's failure, of whatever kind, is a line of the report
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            say(f"{name}, {tokens} tokens, {work}: failed: {reason:.200}")
        else:
            candidates[name] = candidate
    hit = len(np.unique(problem.ids))
    floor = rates.floor(sizes, tokens, hit, problem.tokens.dtype.itemsize, train)
    done = operations(sizes, tokens) * (3 if train else 1)
    return [
        Time(name, work, tokens, 1e3 * seconds, done / seconds / 1e12, floor / seconds)
        for name, seconds in interleave(candidates, repeats).items()
    ]


def table(times: tp.Sequence[Time]) -> list[str]:
    """The lines of a table: above 1 in its last column, another takes longer than ours."""
    ours = {(t.work, t.tokens): t.ms for t in times if t.name == _OURS}
    lines = [
        f"{'tokens':>8}  {'pass':<9} {'':<11}{'ms':>10}{'TFLOP/s':>10}{'of floor':>10}{'/ ours':>8}"
    ]
    for t in times:
        ratio = "" if t.name == _OURS else f"{t.ms / ours[t.work, t.tokens]:.2f}"
        lines.append(
            f"{t.tokens:>8}  {t.work:<9} {t.name:<11}{t.ms:>10.3f}{t.tflops:>10.3f}"
            f"{t.floor:>10.2f}{ratio:>8}".rstrip()
        )
    return lines


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_command(commands: tp.Any) -> None:
    """Adds ``bench`` to the subcommands of ``moe-flax``."""
    parser = commands.add_parser("bench", help="time the routed half of a layer beside others'")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", help="a named model's sizes, such as qwen3-30b-a3b")
    what.add_argument("--shape", type=_positive, nargs=4, metavar=("E", "K", "D", "F"))
    parser.add_argument("--tokens", type=_positive, nargs="+", default=[4096])
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, CPU float32"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="ours")
    parser.add_argument("--passes", choices=PASSES, nargs="+", default=PASSES)
    parser.add_argument("--peers", choices=bench_peers.PEERS, nargs="*", default=bench_peers.PEERS)
    parser.add_argument("--repeats", type=_positive, default=7, help="of which the median counts")
    parser.add_argument("--json", type=pathlib.Path, help="write the times here")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the times here, such as bench.png")
    parser.set_defaults(run=functools.partial(_run, parser))


def _sizes(arguments: argparse.Namespace) -> Sizes:
    if arguments.preset:
        config = MoEConfig.preset(arguments.preset)
        return Sizes(
            config.num_experts,
            config.num_experts_per_token,
            config.features,
            config.hidden_features,
        )
    sizes = Sizes(*arguments.shape)
    if sizes.top_k > sizes.experts:
        raise ValueError(f"K experts of E must be chosen, got K={sizes.top_k} > E={sizes.experts}")
    return sizes


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    try:
        sizes = _sizes(arguments)
        backend = resolve_backend(arguments.backend)
        for path in (arguments.json, arguments.plot):
            if path and not path.absolute().parent.is_dir():
                raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
        if arguments.plot and arguments.plot.suffix not in _PICTURES:
            raise ValueError(f"--plot writes {', '.join(_PICTURES)}, got {arguments.plot}")
        if arguments.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'moe-flax[plots]'")
    except ValueError as error:
        parser.error(str(error))
    device = jax.devices()[0]
    platform = "gpu" if device.platform == "cuda" else device.platform
    dtype = arguments.dtype or ("float32" if platform == "cpu" else "bfloat16")
    print(f"{device.device_kind}, jax {jax.__version__}, {dtype}, backend {backend}")
    print(f"{sizes}; SwiGLU without biases, {arguments.repeats} interleaved repetitions, medians")
    peers = []
    for name in arguments.peers:
        reason = bench_peers.missing(name, platform)
        if reason:
            print(f"{name}: left out: {reason}")
        else:
            peers.append(name)
    rates = measure_rates(dtype, arguments.repeats, platform == "cpu")
    print(
        f"floor from a copy at {rates.bytes / 1e9:.1f} GB/s and a dense {dtype} product at"
        f" {rates.operations / 1e12:.3f} TFLOP/s, measured now"
    )
    cells = [(tokens, work) for tokens in arguments.tokens for work in arguments.passes]
    times = []
    for tokens, work in tqdm.tqdm(cells, desc="bench", leave=False):
        times += measure(
            sizes, tokens, work, dtype=dtype, backend=backend, peers=peers, rates=rates,
            repeats=arguments.repeats, say=tqdm.tqdm.write,
        )  # fmt: skip
    print("\n".join(table(times)))
    if arguments.json:
        rows = [dataclasses.asdict(t) for t in times]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        from moe_flax import plots

        title = f"{arguments.preset or 'MoE layer'} on {device.device_kind}: {sizes}, {dtype}"
        plots.benchmark(times, title=title).savefig(arguments.plot)
        print(f"wrote {arguments.plot}")

"""Finds the tiles of every grouped product of the models' layers; writes the table of one chip.

    python benchmarks/gpu_tune.py [--json FILE] [--seconds N]      on the GPU: measures
    python benchmarks/gpu_tune.py --table FILE                     anywhere: rewrites tuned.py

Candidates of one product take turns, so that all of them meet the chip as warm as it is. Kernels
are lowered by processes that see no GPU: lowering fills the CPU's cores. The products of one layer
share the rows of a tile, so these are chosen by the sum over the products of a forward pass.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import pprint
import time
import typing as tp

from gpu_layer import MODELS, TOKENS, TRAIN

from moe_flax.kernels.grouped_matmul.triton import configs, launch

TABLE = pathlib.Path(configs.__file__).with_name("tuned.py")
ROUNDS = 7
GAIN = 0.985  # what is not faster than the heuristic by this much leaves it in place
Tiles = configs.Tiles


@dataclasses.dataclass(frozen=True)
class Job:
    """One product of a model's layer with one configuration.

    `kind` is that of `configs.Shape`; k and n are of the product, which has `branches` of n.
    """

    kind: str
    model: str
    tokens: int
    k: int
    n: int
    branches: int
    tiles: Tiles
    gather_first: bool = False
    heuristic: bool = False

    @property
    def product(self) -> tuple:
        return self.kind, self.model, self.tokens, self.k, self.n, self.branches

    @property
    def groups(self) -> int:
        return MODELS[self.model][0]

    @property
    def rows(self) -> int:
        return self.tokens * MODELS[self.model][1]


def candidates(kind: str, height: int, branches: int) -> list[tuple[Tiles, bool]]:
    """Configurations worth a try: (tiles, whether rows are gathered first)."""
    fused = kind == "fused"
    wide = 256 // branches if fused else 256
    if kind == "contraction":
        shapes: list[tp.Any] = [(64, 256, 128, 4, 4, span, 1, True) for span in (4, 8, 16)]
        shapes += [(64, 256, 128, 8, 4, 8), (64, 256, 128, 8, 3, 8), (64, 128, 128, 4, 3, 8, 2)]
        return [(Tiles(*shape), False) for shape in shapes]
    if height < 128:
        shapes = [(wide, 64, warps, stages) for warps, stages in ((4, 4), (4, 5), (4, 6), (8, 4))]
        shapes += [(wide, 128, 4, 3), (wide, 128, 8, 3), (wide, 64, 4, 3, 8, 2)]
        shapes += [(wide // 2, 64, 4, 4, 8, 2), (wide // 2, 128, 4, 3, 8, 2), (wide // 2, 64, 4, 6)]
        shapes += [(wide // 2, 128, 4, 5), (wide // 2, 64, 4, 4, 8, 3)]
        return [(Tiles(height, *shape), False) for shape in shapes]
    shapes = [(wide, 64, 8, 4, span) for span in (4, 8, 16)] + [(wide, 64, 8, 3, 8)]
    shapes += [(wide // 2, 64, 4, 3, 8, 2), (wide // 2, 64, 4, 4, 8, 2)]
    shapes += [(wide, 64, 4, 4, span, 1, True) for span in (4, 8, 16)]
    found = [(Tiles(height, *shape), fused) for shape in shapes]
    if fused:
        found += [(tiles, False) for tiles, _ in found if tiles.specialised]
    return found


def jobs() -> list[Job]:
    """Every candidate of every product, those of one product after another."""
    found = []
    for model, (experts, top_k, features, hidden) in MODELS.items():
        for tokens in TOKENS:
            usual = configs.rows_class(tokens * top_k, experts)
            average = tokens * top_k / experts
            heights = {usual} | {h for h in (16, 32, 64, 128) if h / 4 <= average <= h / 0.75}
            products = [("fused", features, hidden, 2), ("product", hidden, features, 1)]
            for kind, k, n, branches in products:
                for height in sorted(heights):
                    found += _jobs(kind, model, tokens, k, n, branches, height)
            if TRAIN.get(model) != tokens:
                continue
            for kind, k, n, branches in (
                ("product", features, hidden, 2),
                ("transposed", features, hidden, 1),
                ("summed", hidden, features, 2),
                ("contraction", features, hidden, 2),
                ("contraction", hidden, features, 1),
            ):
                found += _jobs(kind, model, tokens, k, n, branches, 128)
    return found


def _jobs(kind, model, tokens, k, n, branches, height) -> list[Job]:
    experts, top_k, *_ = MODELS[model]
    rows = tokens * top_k
    with launch.compile_for(90):
        usual = configs.heuristic(
            launch.chip(), configs.Shape(kind, rows, experts, k, n, 2, branches)
        )
    tried = candidates(kind, height, branches)
    if usual[0].rows == height or kind == "contraction":
        tried = [usual, *(each for each in tried if each != usual)]
    made = [Job(kind, model, tokens, k, n, branches, *each, each == usual) for each in tried]
    return [job for job in made if not job.tiles.specialised or (k % 64 == 0 and n % 8 == 0)]


def function_of(job: Job) -> tp.Callable:
    """The kernel, or with rows gathered first both kernels."""
    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import calls, sorting
    from moe_flax.kernels.grouped_matmul.triton.combine import gather

    height = 128 if job.kind == "contraction" else job.tiles.rows

    def run(lhs, rhs, table, row_token):
        capacity = sorting.plan_capacity(job.rows, job.groups, height)
        plan = sorting.Plan(table, job.groups, capacity, height)
        if job.kind == "contraction":
            return calls.contraction(lhs, rhs, plan, tiles=job.tiles, out_dtype=lhs.dtype)
        options: dict[str, tp.Any] = {"transposed": job.kind in ("transposed", "summed")}
        if job.kind == "fused":
            options["activation"] = Activation()
            if job.gather_first:
                lhs = gather(lhs, row_token)
            else:
                options["gather"] = row_token
        return calls.product(lhs, rhs, plan, job.rows, tiles=job.tiles, **options)

    return run


def specs(job: Job) -> tuple:
    """Shapes and dtypes of the arguments of `function_of`."""
    import jax
    import jax.numpy as jnp

    from moe_flax.kernels.grouped_matmul.triton import sorting

    shape = jax.ShapeDtypeStruct
    height = 128 if job.kind == "contraction" else job.tiles.rows
    capacity = sorting.plan_capacity(job.rows, job.groups, height)
    lhs, rhs = (job.rows, job.k), (job.groups, job.branches, job.k, job.n)
    if job.kind == "contraction":
        rhs = (job.rows, job.branches, job.n)
    elif job.kind == "fused":
        lhs = (job.tokens, job.k)
    elif job.kind == "summed":
        lhs, rhs = (job.rows, job.branches, job.k), (job.groups, job.branches, job.n, job.k)
    elif job.kind == "transposed":
        rhs = (job.groups, job.branches, job.n, job.k)
    return (
        shape(lhs, jnp.bfloat16),
        shape(rhs, jnp.bfloat16),
        shape((2 + job.groups + 2 * capacity,), jnp.int32),
        shape((job.rows,), jnp.int32),
    )


def export(job: Job) -> bytes | str:
    """Lowers a job for the GPU in a process without one; says why where that fails."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax_triton

    check = jax.export.DisabledSafetyCheck.custom_call(jax_triton.CUSTOM_CALL_TARGET_NAME)
    try:
        with launch.compile_for(90):
            exported = jax.export.export(
                jax.jit(function_of(job)), platforms=("cuda",), disabled_checks=[check]
            )(*specs(job))
    except Exception as error:
        return repr(error)[:300]
    return bytes(exported.serialize())


def measure(chosen: list[Job], lowered: list, ids_of: tp.Callable) -> list[dict]:
    """Median milliseconds of each candidate of one product, in turns."""
    import jax
    import jax.numpy as jnp

    from moe_flax.kernels.grouped_matmul.triton.sorting import sort_by_expert

    first = chosen[0]
    ids = ids_of(first)
    orders = {}
    shapes = specs(first)
    lhs, rhs = (
        jax.jit(lambda key, s=s: jax.random.normal(key, s.shape, s.dtype))(jax.random.key(i))
        for i, s in enumerate(shapes[:2])
    )

    def prepare(job: Job, data) -> tuple[dict, tp.Any, tp.Any]:
        row: dict = {**dataclasses.asdict(job), "ms": None}
        try:
            if isinstance(data, str):
                raise RuntimeError(data)
            order = orders[128 if job.kind == "contraction" else job.tiles.rows]
            call = jax.jit(jax.export.deserialize(bytearray(data)).call)
            arguments = (lhs, rhs, order.plan.table, order.row_token)
            compiled = call.lower(*arguments).compile()
            jax.block_until_ready(compiled(*arguments))
        except Exception as error:
            row["error"] = repr(error)[:300]
            return row, None, None
        return row, compiled, arguments

    for height in {128 if job.kind == "contraction" else job.tiles.rows for job in chosen}:
        orders[height] = sort_by_expert(ids, jnp.ones(ids.shape), first.groups, height)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:  # the assembler takes a second each
        prepared = list(pool.map(prepare, chosen, lowered))
    rows = [row for row, *_ in prepared]
    runs, expected = [], None

    @jax.jit
    def distance(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    for row, compiled, arguments in prepared:
        if compiled is not None:
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            once = time.perf_counter() - start
            out = compiled(*arguments)
            expected = out if not runs else expected
            row["distance"] = float(distance(out, expected))
            if row["distance"] > 1e-2:
                row["error"] = "another result"
                continue
            runs.append((row, compiled, arguments, max(2, min(30, int(4e-3 / max(once, 1e-5))))))
    times = collections.defaultdict(list)
    for _ in range(ROUNDS):
        for number, (_, compiled, arguments, count) in enumerate(runs):
            jax.block_until_ready(compiled(*arguments))
            start = time.perf_counter()
            out = None
            for _ in range(count):
                out = compiled(*arguments)
            jax.block_until_ready(out)
            times[number].append((time.perf_counter() - start) / count * 1e3)
    for number, (row, *_) in enumerate(runs):
        row["ms"] = sorted(times[number])[ROUNDS // 2]
    return rows


def run(deadline: float) -> list[dict]:
    """Measures every product for which there is time."""
    context = multiprocessing.get_context("spawn")
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    os.environ["JAX_PLATFORMS"] = "cpu"
    pool = concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), context)
    by_product: dict[tuple, list] = {}
    for job in jobs():
        by_product.setdefault(job.product, []).append((job, pool.submit(export, job)))
    os.environ["JAX_PLATFORMS"] = platforms
    import jax

    def ids_of(job):
        logits = jax.random.normal(jax.random.key(9), (job.tokens, job.groups))
        return jax.lax.top_k(logits, MODELS[job.model][1])[1]

    rows = []
    for product, pairs in by_product.items():
        if time.time() > deadline:
            break
        rows += measure([j for j, _ in pairs], [f.result() for _, f in pairs], ids_of)
        timed = [r for r in rows[-len(pairs) :] if r["ms"]]
        usual = [r["ms"] for r in timed if r["heuristic"]]
        best = min(timed, key=lambda r: r["ms"], default=None)
        print(product, "usual", usual, "best", best and (best["ms"], best["tiles"]), flush=True)
    for process in list(pool._processes.values()):
        process.kill()
    return rows


def choose(rows: list[dict]) -> dict[tuple, tuple]:
    """The table: by class of shape, the arguments of `Tiles` and whether to gather first."""
    timed = [row for row in rows if row["ms"]]
    layers = collections.defaultdict(list)
    for row in timed:
        layers[row["model"], row["tokens"]].append(row)
    table = {}
    for found in layers.values():
        heights = {r["tiles"]["rows"] for r in found if r["kind"] == "fused"}
        forward = {
            height: [_best(found, kind, height) for kind in ("fused", "product")]
            for height in heights
        }
        whole = {h: best for h, best in forward.items() if all(best)}
        if not whole:
            continue
        usual = next(r["tiles"]["rows"] for r in found if r["kind"] == "fused" and r["heuristic"])

        def cost(height, whole=whole, usual=usual):
            return sum(r["ms"] for r in whole[height]) * (1 if height != usual else GAIN)

        height = min(whole, key=cost)
        others = {(r["kind"], r["k"], r["n"], r["branches"]) for r in found}
        for kind, k, n, branches in sorted(others):
            best = _best(found, kind, height, k, n, branches)
            if best is not None:
                shape = configs.Shape(
                    kind, best["tokens"] * MODELS[best["model"]][1], MODELS[best["model"]][0],
                    k, n, 2, branches,
                )  # fmt: skip
                tiles = dataclasses.astuple(Tiles(**best["tiles"]))
                table[(90, *configs.shape_class(shape))] = (tiles, best["gather_first"])
    return table


def _best(rows, kind, height, k=None, n=None, branches=None) -> dict | None:
    fitting = [
        r for r in rows
        if r["kind"] == kind and (kind == "contraction" or r["tiles"]["rows"] == height)
        and k in (None, r["k"]) and n in (None, r["n"]) and branches in (None, r["branches"])
    ]  # fmt: skip
    return min(fitting, key=lambda r: r["ms"] * (GAIN if r["heuristic"] else 1), default=None)


def write(table: dict[tuple, tuple]) -> None:
    """Rewrites tuned.py."""
    lines = pprint.pformat(dict(sorted(table.items())), width=96)
    TABLE.write_text(
        '"""Tiles by chip and class of shape, measured by benchmarks/gpu_tune.py; do not edit.\n\n'
        "Keys: compute capability and `configs.shape_class`. Values: arguments of `Tiles`, and\n"
        'whether rows are gathered before a fused product.\n"""\n\n'
        f"TABLE: dict[tuple, tuple[tuple, bool]] = {lines}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write every figure here")
    parser.add_argument("--seconds", type=float, default=540, help="start no product later")
    parser.add_argument("--table", help="figures to make the table of; measures nothing")
    arguments = parser.parse_args()
    if arguments.table:
        write(choose(json.loads(pathlib.Path(arguments.table).read_text())))
        return
    rows = run(time.time() + arguments.seconds)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

"""Quantised weights as they are stored, on one GPU: right, and how fast beside our own bfloat16.

    python benchmarks/gpu_quantized.py [--json FILE] [--seconds N] [--models M ..] [--tokens T ..]
        [--kinds block mxfp4 channel] [--no-numerics] [--no-layers] [--no-kernels]

Three parts. Numerics: small layers against the float32 reference on dequantised weights. Layers:
the routed half from given ids, bfloat16 and each kind, with the table's tiles; the result against
the bfloat16 kernels on dequantised weights. Kernels: each product alone, with several tiles;
`VARIANTS` says which. Times are medians, of calls that each run `CHAIN` times; bytes a second count
the stored weights of the experts that are hit.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
import typing

MODELS = {  # E, K, D, F
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3-ep8": (32, 8, 7168, 2048),
    "llama4-scout": (16, 1, 5120, 8192),
}
CHAIN = 4
BOUND = 2e-2
WITH_GRADIENTS = ("gpt_oss mxfp4", "silu block 16")
# What a variant changes of the table's tiles; "triton" takes the kernel that Triton pipelines.
VARIANTS = {
    "table": {},
    "stages+1": {"stages": 1},
    "stages-1": {"stages": -1},
    "programs-1": {"programs": -1},
    "programs+1": {"programs": 1},
    "wide": {"columns": 2, "warps": 2, "programs": -1},
    "wide stages+1": {"columns": 2, "warps": 2, "stages": 1, "programs": -1},
    "narrow": {"columns": 0.5, "programs": 1},
    "rows/2": {"rows": 0.5},
    "rows*2": {"rows": 2},
    "span 1": {"span": 1},
    "triton": {"specialised": False, "stages": 4},
    "triton wide": {"specialised": False, "columns": 2, "stages": 3},
}


def stored_bytes(kind: str) -> float:
    """Bytes of a weight with its share of a scale."""
    return {"bf16": 2, "block": 1, "channel": 1, "mxfp4": 0.5 + 1 / 32}[kind]


def changed(tiles, variant: str):
    """The tiles of a variant, or None where there are none such."""
    change = dict(VARIANTS[variant])
    new = {}
    for name in ("rows", "columns", "warps"):
        new[name] = int(getattr(tiles, name) * change.pop(name, 1))
    if "specialised" in change:
        new |= change
    else:
        new |= {name: getattr(tiles, name) + change.pop(name, 0) for name in ("stages", "programs")}
        new |= change
    made = dataclasses.replace(tiles, **new)
    bad = made.rows < 16 or made.columns < 64 or made.stages < 2 or made.programs < 1
    bad = bad or made.columns > 128 * (made.warps // 4) or made.rows > 128
    return None if bad or (variant != "table" and made == tiles) else made


def shapes(model: str, kind: str):
    """wi, its scales, wo and its scales as they are stored."""
    import jax
    import jax.numpy as jnp

    from moe_flax import quantize

    experts, _, features, hidden = MODELS[model]
    make = {
        "block": quantize.quantize_blocks,
        "channel": quantize.quantize_channels,
        "mxfp4": quantize.quantize_mxfp4,
    }[kind]
    wi = jax.ShapeDtypeStruct((experts, 2, hidden, features), jnp.bfloat16)
    wo = jax.ShapeDtypeStruct((experts, features, hidden), jnp.bfloat16)
    return (*jax.eval_shape(make, wi), *jax.eval_shape(make, wo))


def tiles_of(model: str, tokens: int, kind: str):
    """The table's tiles of both products."""
    import jax
    import jax.numpy as jnp

    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import ffn_kept

    _, top_k, features, _ = MODELS[model]
    wi, wi_scale, wo, wo_scale = shapes(model, kind)
    x = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    call = ffn_kept.make_call(Activation(), x, wi, wo, wi_scale, wo_scale, ids)
    if call is None:
        raise ValueError(f"{model} with {tokens} tokens is dequantised ahead")
    return call


def layer(model: str, tokens: int, kind: str):
    """A function of arrays, and their shapes: CHAIN layers one after another."""
    import jax
    import jax.numpy as jnp

    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import ffn, ffn_kept

    experts, top_k, features, hidden = MODELS[model]
    shape = jax.ShapeDtypeStruct
    x, ids = shape((tokens, features), jnp.bfloat16), shape((tokens, top_k), jnp.int32)
    routing = (ids, shape((tokens, top_k), jnp.float32))
    if kind == "bf16":
        weights = (
            shape((experts, 2, features, hidden), jnp.bfloat16),
            shape((experts, hidden, features), jnp.bfloat16),
        )
        call = ffn.make_call(Activation(), x, weights[0], ids)

        def dense(x, wi, wo, *routing):
            return ffn.routed_ffn(call, x, wi, wo, None, None, *routing)

        one = dense
    else:
        wi, wi_scale, wo, wo_scale = shapes(model, kind)
        weights = (wi, wo, wi_scale, wo_scale)
        call = tiles_of(model, tokens, kind)

        def kept(x, *operands):
            return ffn_kept.routed_ffn(call, x, *operands[:4], None, None, *operands[4:])

        one = kept

    def chain(x, *operands):
        first = one(x, *operands)
        y = first
        for _ in range(CHAIN - 1):
            y = one(y, *operands)
        return first, y

    return chain, (x, *weights, *routing)


def kernel(model: str, tokens: int, kind: str, which: str, variant: str):
    """CHAIN calls of one product on as many arrays of rows; None where the variant is none."""
    import jax
    import jax.numpy as jnp

    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import ffn_kept, kept_hopper, sorting

    experts, top_k, features, hidden = MODELS[model]
    wi, wi_scale, wo, wo_scale = shapes(model, kind)
    call = tiles_of(model, tokens, kind)
    tiles = changed(call.up if which == "up" else call.down, variant)
    if tiles is None:
        return None
    w, scale, width = (wi, wi_scale, features) if which == "up" else (wo, wo_scale, hidden)
    rows, shape = tokens * top_k, jax.ShapeDtypeStruct
    x = shape((rows, width), jnp.bfloat16)
    if tiles.specialised:
        x = jax.eval_shape(functools.partial(kept_hopper.reorder, mxfp4=kind == "mxfp4"), x)
    ids = shape((tokens, top_k), jnp.int32)

    def chain(w, scale, ids, weights, *xs):
        order = sorting.sort_by_expert(ids, weights, experts, tiles.rows)
        w, scale = (w, scale) if which == "up" else (w[:, None], scale[:, None])
        activation = Activation() if which == "up" else None
        then = (kind == "mxfp4") if which == "up" and tiles.specialised else None
        run = functools.partial(
            ffn_kept.product, plan=order.plan, rows=rows, tiles=tiles, activation=activation,
            then=then,
        )  # fmt: skip
        return [run(x, w, scale) for x in xs]

    return chain, (w, scale, ids, shape((tokens, top_k), jnp.float32), *[x] * CHAIN)


def export(maker: str, capability: int, *cell) -> bytes | str | None:
    """Lowers a cell for the GPU in a process without one: lowering fills the CPU's cores."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax_triton

    from moe_flax.kernels.grouped_matmul.triton import launch

    check = jax.export.DisabledSafetyCheck.custom_call(jax_triton.CUSTOM_CALL_TARGET_NAME)
    try:
        with launch.compile_for(capability):
            made = globals()[maker](*cell)
            if made is None:
                return None
            run = jax.export.export(jax.jit(made[0]), platforms=("cuda",), disabled_checks=[check])
            return bytes(run(*made[1]).serialize())
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"


def time_calls(call, wait) -> float:
    """Median milliseconds of CHAIN's one, of five bursts with pauses that let the chip cool."""
    wait(call())
    start = time.perf_counter()
    wait(call())
    once = time.perf_counter() - start
    calls = max(2, min(50, int(0.02 / max(once, 2e-5))))
    times = []
    for _ in range(5):
        time.sleep(0.03)
        wait(call())
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        wait(out)
        times.append((time.perf_counter() - start) / calls / CHAIN * 1e3)
    return sorted(times)[2]


def make_weights(model: str, kind: str):
    """Random weights as they are stored, and the same in bfloat16 as [E, 2, D, F] and [E, F, D]."""
    import jax
    import jax.numpy as jnp

    from moe_flax import quantize

    make = {
        "block": quantize.quantize_blocks,
        "channel": quantize.quantize_channels,
        "mxfp4": quantize.quantize_mxfp4,
    }[kind]
    experts, _, features, hidden = MODELS[model]

    @jax.jit
    def one(key):
        a, b = jax.random.split(key)
        wi = jax.random.normal(a, (2, hidden, features), jnp.float32) * 1.5 * features**-0.5
        wo = jax.random.normal(b, (features, hidden), jnp.float32) * 1.5 * hidden**-0.5
        return *make(wi), *make(wo)

    @jax.jit  # apart: XLA takes rounding to float8 and back for nothing within one program
    def whole(values, scales):
        return quantize.dequantize(values, scales).astype(jnp.bfloat16).swapaxes(-1, -2)

    keys = jax.random.split(jax.random.key(1), experts)
    wi, wi_scale, wo, wo_scale = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
    return (wi, wo, wi_scale, wo_scale), [whole(wi, wi_scale), whole(wo, wo_scale)]


def compile_one(data: bytes, arguments):
    import jax

    exported = jax.export.deserialize(bytearray(data))
    return jax.jit(exported.call).lower(*arguments).compile()


def numerics() -> list[dict]:
    """Small layers by `expert_ffn` against the reference, output and gradients, and odd cases."""
    import jax
    import jax.numpy as jnp

    import moe_flax
    from moe_flax import quantize

    make = {
        "block": quantize.quantize_blocks,
        "channel": quantize.quantize_channels,
        "mxfp4": quantize.quantize_mxfp4,
    }
    cases = {  # T, E, K, D, F, activation, branches, biases, kinds of wi and wo
        "gpt_oss mxfp4": (40, 16, 4, 320, 352, "gpt_oss", 2, True, "mxfp4", "mxfp4"),
        "silu block": (70, 4, 2, 512, 384, "silu", 2, False, "block", "block"),
        "silu block 16": (16, 8, 2, 384, 272, "silu", 2, True, "block", "block"),
        "relu2 int8": (33, 4, 2, 256, 400, "relu2", 1, True, "channel", "channel"),
        "mixed": (60, 4, 2, 256, 448, "silu", 2, True, "block", "mxfp4"),
        "mixed too": (60, 4, 2, 288, 448, "silu", 2, True, "mxfp4", "channel"),
        "no tile loads": (40, 4, 2, 264, 328, "silu", 2, True, "block", "block"),
        "odd widths": (40, 4, 2, 257, 451, "gelu", 2, True, "channel", "block"),
        "one token": (1, 8, 3, 256, 256, "silu", 2, False, "mxfp4", "mxfp4"),
        "empty groups": (24, 64, 1, 256, 256, "silu", 2, True, "block", "block"),
        "longer groups": (300, 4, 1, 256, 512, "silu", 2, True, "mxfp4", "mxfp4"),
    }
    rows = []
    for name, (t, e, k, d, f, activation, j, biases, first, second) in cases.items():
        keys = iter(jax.random.split(jax.random.key(0), 9))

        def normal(*shape, scale=1.0):
            return jax.random.normal(next(keys), shape) * scale  # noqa: B023

        x = normal(t, d).astype(jnp.bfloat16)
        wi, wi_scale = make[first](normal(e, j, f, d, scale=1.5 * d**-0.5))
        wo, wo_scale = make[second](normal(e, d, f, scale=1.5 * f**-0.5))
        scores, ids = jax.lax.top_k(normal(t, e), k)
        if t > 1:
            ids = ids.at[0, 0].set(e)
        weights = jax.nn.softmax(scores)
        wi_bias, wo_bias = (normal(e, j, f), normal(e, d)) if biases else (None, None)

        kept = (wi, wo, wi_scale, wo_scale, ids)

        def run(function, kept, floats, activation=activation, **keywords):
            wi, wo, wi_scale, wo_scale, ids = kept
            x, weights, wi_bias, wo_bias = floats
            return function(
                x, wi, wo, moe_flax.Routing(ids, weights), activation=activation, wi_bias=wi_bias,
                wo_bias=wo_bias, wi_scale=wi_scale, wo_scale=wo_scale, transpose_weights=True,
                **keywords,
            )  # fmt: skip

        ours = functools.partial(run, moe_flax.expert_ffn, backend="triton")
        wanted = functools.partial(run, moe_flax.experts.expert_ffn_reference)
        floats = (x, weights, wi_bias, wo_bias)
        found: dict[str, typing.Any] = {"numerics": name}
        try:
            plain = jax.jit(ours)
            y = plain(kept, floats)
            wide = jax.tree.map(lambda a: a.astype(jnp.float32), floats)
            actual, expected = [y], [jax.jit(wanted)(kept, wide)]
            if name in WITH_GRADIENTS:
                pull = jax.jit(_pull, static_argnums=0)
                actual += jax.tree.leaves(pull(ours, kept, floats, y))
                expected += jax.tree.leaves(pull(wanted, kept, wide, y.astype(jnp.float32)))
            found["errors"] = [distance(a, b) for a, b in zip(actual, expected, strict=True)]
            found["same bits"] = bool((plain(kept, floats) == y).all())
            if t > 1:
                spoilt = plain(kept, (x.at[3].set(jnp.nan), *floats[1:]))
                same = (spoilt == y).all(axis=1) | (jnp.arange(t) == 3)
                found["NaN alone"] = bool(jnp.isnan(spoilt[3]).all() & same.all())
            found["right"] = max(found["errors"]) < BOUND and found["same bits"]
            found["right"] &= found.get("NaN alone", True)
        except Exception as error:
            found["error"] = repr(error)[:600]
            found["right"] = False
        rows.append(found)
        print("WRONG" if not found["right"] else "right", json.dumps(found), flush=True)
    return rows


def _pull(function, kept, floats, cotangent):
    import jax

    return jax.vjp(functools.partial(function, kept), floats)[1](cotangent)


def distance(actual, wanted) -> float:
    """Relative norm of the difference."""
    import jax.numpy as jnp

    wanted = wanted.astype(jnp.float32)
    difference = jnp.linalg.norm((actual.astype(jnp.float32) - wanted).ravel())
    return float(difference / jnp.maximum(jnp.linalg.norm(wanted.ravel()), 1e-30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--seconds", type=float, default=230, help="start no cell later than this")
    parser.add_argument("--models", nargs="+", default=list(MODELS)[:4], choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["block", "mxfp4"])
    parser.add_argument("--kernel-tokens", nargs="+", type=int, default=[16, 256])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--capability", type=int, default=90, help="of the chip that is lowered for"
    )
    for part in ("numerics", "layers", "kernels"):
        parser.add_argument(f"--no-{part}", action="store_true")
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    layers = [
        ("layer", model, tokens, kind)
        for model in options.models
        for kind in (*options.kinds, "bf16")
        for tokens in options.tokens
        if not options.no_layers
    ]
    kernels = [
        ("kernel", model, tokens, kind, which, variant)
        for model in options.models
        for kind in options.kinds
        for tokens in options.kernel_tokens
        for which in ("up", "down")
        for variant in options.variants
        if not options.no_kernels
    ]
    context = multiprocessing.get_context("spawn")
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    os.environ["JAX_PLATFORMS"] = "cpu"
    workers = max(1, (os.cpu_count() or 2) - 3)
    pool = concurrent.futures.ProcessPoolExecutor(workers, context)
    cells = sorted(layers + kernels, key=lambda cell: list(MODELS).index(cell[1]))
    pending = {cell: pool.submit(export, cell[0], options.capability, *cell[1:]) for cell in cells}
    # Every worker is started by its first task, so the variable stays until all have one.
    time.sleep(1)
    os.environ["JAX_PLATFORMS"] = platforms
    rows = []
    try:
        if not options.no_numerics:
            rows += numerics()
        for model in options.models:
            rows += measure(model, options, pending, deadline)
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
    report(rows)


def measure(model: str, options, pending: dict, deadline: float) -> list[dict]:
    """Times a model's cells."""
    import jax
    import jax.numpy as jnp

    rows: list[dict] = []
    experts, _, features, hidden = MODELS[model]
    threads = concurrent.futures.ThreadPoolExecutor(8)
    dense: typing.Any = None
    for kind in (*options.kinds, "bf16"):
        cells = [c for c in pending if c[1] == model and c[3] == kind]
        if not cells or time.time() > deadline:
            continue
        if kind != "bf16":
            kept, dense = make_weights(model, kind)
            operands: typing.Any = kept
        else:
            operands = dense
        ready = {}
        for cell in cells:
            arguments = inputs(cell, operands)

            def build(cell=cell, arguments=arguments):
                data = pending[cell].result()
                if not isinstance(data, bytes):
                    return data
                try:
                    return compile_one(data, arguments)
                except Exception as error:
                    return f"{type(error).__name__}: {str(error)[:300]}"

            ready[cell] = (threads.submit(build), arguments)
        for cell, (future, arguments) in ready.items():
            if time.time() > deadline:
                break
            compiled = future.result()
            if compiled is None:
                continue
            row: dict[str, typing.Any] = dict(
                zip(("part", "model", "tokens", "kind", "which", "variant"), cell, strict=False)
            )
            if isinstance(compiled, str):
                rows.append(row | {"error": compiled})
                print(json.dumps(rows[-1]), flush=True)
                continue
            try:
                row["ms"] = time_calls(lambda: compiled(*arguments), jax.block_until_ready)  # noqa: B023
            except Exception as error:
                rows.append(row | {"error": repr(error)[:300]})
                print(json.dumps(rows[-1]), flush=True)
                continue
            ids = arguments[-2] if cell[0] == "layer" else arguments[2]
            hit = int((jnp.bincount(ids.ravel(), length=experts) > 0).sum())
            matrices = {"up": 2, "down": 1}.get(row.get("which", ""), 3)
            moved = hit * matrices * features * hidden * stored_bytes(kind)
            row["TB/s"] = moved / row["ms"] / 1e9
            if cell[0] == "layer" and kind != "bf16":
                row["error_norm"] = against_dense(model, compiled(*arguments)[0], arguments, dense)
                row["right"] = row["error_norm"] < BOUND
            rows.append(row)
            print(json.dumps(row), flush=True)
        del operands, ready
    return rows


def inputs(cell, operands):
    """Arrays for a cell: (x, weights, scales, ids, weights) or (w, scale, ids, weights, rows..)."""
    import jax
    import jax.numpy as jnp

    part, model, tokens = cell[:3]
    experts, top_k, features, _ = MODELS[model]
    keys = jax.random.split(jax.random.key(tokens), 6)
    scores, ids = jax.lax.top_k(jax.random.normal(keys[0], (tokens, experts)), top_k)
    routing = (ids, jax.nn.softmax(scores))
    if part == "layer":
        x = jax.random.normal(keys[1], (tokens, features), jnp.bfloat16)
        return (x, *operands, *routing)
    wi, wo, wi_scale, wo_scale = operands
    up = cell[4] == "up"
    size = _rows(cell)
    rows = [jax.random.normal(k, size, jnp.bfloat16) for k in keys[2:]]
    return (*((wi, wi_scale) if up else (wo, wo_scale)), *routing, *rows[:CHAIN])


def _rows(cell) -> tuple[int, ...]:
    _, model, tokens, kind, which, variant = cell
    _, top_k, features, hidden = MODELS[model]
    width = features if which == "up" else hidden
    if "specialised" in VARIANTS[variant]:
        return (tokens * top_k, width)
    step = 256 if kind == "mxfp4" else 128
    return (-(-width // step) * step // 64, tokens * top_k, 64)


@functools.cache
def _dense_layer(model: str, tokens: int):
    import jax

    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul.triton import ffn

    def run(x, wi, wo, ids, weights):
        call = ffn.make_call(Activation(), x, wi, ids)
        return ffn.routed_ffn(call, x, wi, wo, None, None, ids, weights)

    return jax.jit(run)


def against_dense(model: str, y, arguments, dense) -> float:
    """Distance of a layer's result from the bfloat16 kernels' on dequantised weights."""
    x, ids, weights = arguments[0], *arguments[-2:]
    return distance(y, _dense_layer(model, x.shape[0])(x, *dense, ids, weights))


def report(rows: list[dict]) -> None:
    """Prints layers beside bfloat16, and the quickest tiles of each product."""
    dense = {(r["model"], r["tokens"]): r["ms"] for r in rows
             if r.get("part") == "layer" and r["kind"] == "bf16" and "ms" in r}  # fmt: skip
    for row in rows:
        if row.get("part") == "layer" and "ms" in row and row["kind"] != "bf16":
            wide = dense.get((row["model"], row["tokens"]), float("nan"))
            print(
                f"{row['model']:16}{row['tokens']:5} {row['kind']:8} {row['ms']:.3f} ms,"
                f" bf16 {wide:.3f}, {wide / row['ms']:.2f}x, {row['TB/s']:.2f} TB/s,"
                f" off by {row['error_norm']:.1e}{'' if row['right'] else ' WRONG'}"
            )
    best: dict[tuple, list] = {}
    for row in rows:
        if row.get("part") == "kernel" and "ms" in row:
            key = tuple(row[k] for k in ("model", "tokens", "kind", "which"))
            best.setdefault(key, []).append((row["ms"], row["variant"], row["TB/s"]))
    for key, found in best.items():
        line = ", ".join(f"{name} {ms:.3f} ({rate:.2f})" for ms, name, rate in sorted(found))
        print(*key, "|", line)
    wrong = [r for r in rows if r.get("right") is False or "error" in r]
    print("all right" if not wrong else f"{len(wrong)} wrong or failed", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

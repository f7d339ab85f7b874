"""Trains a byte-level mixture-of-experts decoder over a mesh, beside a dense one; saves both ways.

    python examples/quickstart.py [--out out/quickstart] [--steps 400]

Eight CPU devices stand in for eight accelerators; nothing but ``make_mesh`` would change on them.
Exits with 1 where a check fails.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import argparse
import pathlib
import shutil
import sys
import time

import corpus
import jax
import mixtral_format
import numpy as np
import orbax.checkpoint as ocp
from decoder import Decoder, DecoderConfig, active_parameters
from flax import nnx
from jax.sharding import AxisType, Mesh
from training import Balance, History, make_decoder, place, train

import moe_flax
from moe_flax import losses, plots

FEATURES, LAYERS, HEADS = 64, 2, 2
EXPERTS, CHOSEN, EXPERT_WIDTH = 16, 2, 64
STEPS, BATCH, CONTEXT, LEARNING_RATE = 400, 32, 128, 4e-3
TOLERANCE = 1e-4  # of a token's logits, relative: other meshes add in another order

MOE = DecoderConfig(
    FEATURES,
    LAYERS,
    HEADS,
    moe=moe_flax.MoEConfig(
        features=FEATURES,
        hidden_features=EXPERT_WIDTH,
        num_experts=EXPERTS,
        num_experts_per_token=CHOSEN,
        router=moe_flax.RouterConfig(correction_bias=True),  # else Mixtral's
    ),
)
# As wide as the chosen experts together, and a little wider for the router's weights.
DENSE = DecoderConfig(
    FEATURES, LAYERS, HEADS, hidden_features=CHOSEN * EXPERT_WIDTH + EXPERTS // 3 + 1
)


class Checks:
    """Prints each check as it is made, and remembers whether one failed."""

    def __init__(self):
        self.failed = 0

    def __call__(self, passed: bool, text: str) -> None:
        self.failed += not passed
        print(f"  {'ok  ' if passed else 'FAIL'} {text}", flush=True)


def make_mesh(data: int, expert: int) -> Mesh:
    """A mesh whose names ("data", "expert") moe_flax knows: no rules needed."""
    return jax.make_mesh((data, expert), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def logits(model: Decoder, windows: np.ndarray, mesh: Mesh | None) -> np.ndarray:
    """[B, T, 256] on a mesh, or on one device."""
    if mesh is None:
        return np.asarray(nnx.jit(lambda m, t: m(t)[0])(model, windows))
    with jax.set_mesh(mesh):
        return np.asarray(nnx.jit(lambda m, t: m(t)[0])(model, windows))


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of tokens whose logits agree. A tie between experts, broken otherwise, costs a few."""
    error = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
    return float(np.mean(error < TOLERANCE))


def restore(path: pathlib.Path, mesh: Mesh) -> Decoder:
    """Restores onto any mesh: each device reads its own part."""
    model = make_decoder(MOE, mesh, seed=1)
    state = place(nnx.state(model), mesh)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(model, checkpointer.restore(path, target))
    return model


def violation(history: History, until: int, window: int = 10) -> float:
    """Mean over layers and the ``window`` steps before ``until`` of the maximum violation."""
    load = history.load[max(until - window, 0) : until]
    return float(losses.max_violation(jax.numpy.asarray(load)).mean())


def draw(out: pathlib.Path, runs: dict[str, History], balance: Balance) -> None:
    """The pictures: loss curves of both, expert load of the one that has experts."""
    plots.loss_curves(
        {name: (range(len(run.train)), run.train) for name, run in runs.items()},
        points={
            name: ([step for step, _ in run.validation], [bits for _, bits in run.validation])
            for name, run in runs.items()
        },
        ylabel="bits per byte",
        title="Equal active parameters, same data, same steps",
    ).savefig(out / "loss.png")
    plots.load_heatmap(
        runs["MoE"].load,
        marks={
            balance.bias_from: "correction bias moves",
            balance.bias_until: "bias let go, loss takes over",
        },
    ).savefig(out / "load.png")


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains, saves and exports an MoE decoder.")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/quickstart"))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    out, steps = arguments.out.resolve(), arguments.steps
    for name in ("orbax", "mixtral"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    began, check = time.monotonic(), Checks()

    text = corpus.standard_library()
    mesh = make_mesh(data=2, expert=4)
    print(f"Text: {text.num_files} files of Python's standard library,")
    print(
        f"  {len(text.train):,} bytes to train on, {len(text.validation):,} of others to validate"
    )
    print(f"Mesh: {dict(mesh.shape)}, {mesh.size} CPU devices")
    print(f"Decoder: {LAYERS} layers, width {FEATURES}, {EXPERTS} experts, {CHOSEN} a byte")
    print(
        f"  active parameters: {active_parameters(MOE):,} MoE, {active_parameters(DENSE):,} dense"
    )

    balance = Balance(
        bias_from=steps // 10, bias_until=steps * 3 // 4, rate=6e-3, loss_coefficient=0.01
    )
    runs, models = {}, {}
    for name, config in {"MoE": MOE, "dense": DENSE}.items():
        models[name] = make_decoder(config, mesh, seed=0)
        runs[name] = train(
            models[name],
            text,
            mesh,
            name=f"{name:5}",
            steps=steps,
            batch=BATCH,
            context=CONTEXT,
            learning_rate=LEARNING_RATE,
            balance=balance,
        )
    model = models["MoE"]
    draw(out, runs, balance)

    print("Validation, bits per byte:")
    ours, dense = (runs[name].validation[-1][1] for name in ("MoE", "dense"))
    check(ours < dense, f"MoE {ours:.3f}, dense {dense:.3f} ({(ours / dense - 1) * 100:+.1f} %)")

    print(f"Expert load, maximum violation (0 is even, {EXPERTS / CHOSEN - 1:.0f} the worst):")
    before, after = (
        violation(runs["MoE"], balance.bias_from),
        violation(runs["MoE"], balance.bias_until),
    )
    check(after < before / 2, f"{before:.2f} before the bias moves, {after:.2f} after")
    final = violation(runs["MoE"], steps)
    check(
        final < before / 2,
        f"{final:.2f} at the end: Mixtral has no bias, so it was let go and the loss took over",
    )

    probe = corpus.even_windows(text.validation, 64, 32)
    expected = logits(model, probe, mesh)

    print("Orbax: saved on this mesh, restored on another:")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out / "orbax", nnx.state(model))
    other = make_mesh(data=1, expert=8)
    restored = restore(out / "orbax", other)
    pairs = zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(restored)), strict=True
    )
    same = [np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs]
    check(all(same), f"{len(same)} arrays bit-equal on {dict(other.shape)}")
    share = agreement(logits(restored, probe, other), expected)
    check(share > 0.95, f"same logits for {share:.1%} of {probe.size:,} bytes")

    print("Mixtral: exported, loaded on one device without a mesh:")
    mixtral_format.save(out / "mixtral", model, context=CONTEXT)
    loaded = mixtral_format.load(out / "mixtral")
    written = sorted(path.name for path in (out / "mixtral").iterdir())
    print(f"       {out / 'mixtral'}: {', '.join(written)}")
    share = agreement(logits(loaded, probe, None), expected)
    check(share > 0.95, f"same logits for {share:.1%} of {probe.size:,} bytes")

    print(f"Pictures: {out / 'loss.png'}, {out / 'load.png'}")
    print(f"{time.monotonic() - began:.0f} s, {check.failed or 'no'} checks failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Inputs, meshes and the check that all tests of the fused kernel share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe, fused_ep_moe_reference
from moe_flax.routing import Routing

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
SMALL = BlockSizes(rows=16, hidden=128, features=128)


def interpreter(mode="on_wait"):
    """Races looked for, memory that starts as NaN, reads out of bounds raise."""
    return pltpu.InterpretParams(
        dma_execution_mode=mode,
        detect_races=True,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
    )


def make_mesh(kind=AxisType.Auto, **sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(kind,) * len(sizes),
        devices=jax.devices()[:count],
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a layer, and inputs that give outputs of order 1."""

    tokens: int = 61
    experts: int = 8
    k: int = 2
    features: int = 256
    hidden: int = 256
    dtype: str = "bfloat16"
    branches: int = 2

    def inputs(self, seed=0):
        keys = jax.random.split(jax.random.key(seed), 6)
        e, d, f = self.experts, self.features, self.hidden
        return {
            "tokens": jax.random.normal(keys[0], (self.tokens, d)).astype(self.dtype),
            "wi": (jax.random.normal(keys[1], (e, self.branches, d, f)) / d**0.5 * 1.5).astype(
                self.dtype
            ),
            "wo": (jax.random.normal(keys[2], (e, f, d)) / f**0.5 * 1.5).astype(self.dtype),
            "weights": jax.nn.softmax(jax.random.normal(keys[3], (self.tokens, self.k))),
        }

    def biases(self, seed=0):
        keys = jax.random.split(jax.random.key(seed + 100), 2)
        shape = (self.experts, self.branches, self.hidden)
        return {
            "wi_bias": jax.random.normal(keys[0], shape),
            "wo_bias": jax.random.normal(keys[1], (self.experts, self.features)),
        }

    def routings(self, sources, seed=0):
        """Names to expert ids: even, skewed and empty loads; ids of E have no expert."""
        t, e, k = self.tokens, self.experts, self.k
        local = e // sources
        rng = np.random.default_rng(seed)

        def among(choices):
            return np.stack([rng.permutation(choices)[:k] for _ in range(t)])

        one = np.full((t, k), e)
        one[:, 0] = e - 1
        first_device = among(np.arange(max(local, k)))
        none_on_first = among(np.arange(local, e)) if e - local >= k else among(np.arange(e))
        dropped = among(np.arange(e))
        dropped[::2] = e
        dropped[1, 0] = e + 3
        return {
            "random": among(np.arange(e)),
            "one_expert": one,
            "first_device": first_device,
            "none_on_first": none_on_first,
            "half_dropped": dropped,
            "nothing": np.full((t, k), e),
        }


def relative_error(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-30)


def shrinkage(out, ref):
    """How much smaller than the reference the output is on the whole, relative to it."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return np.sum((ref - out) * ref) / max(np.sum(ref * ref), 1e-30)


@functools.lru_cache(maxsize=2)
def compiled(mesh, mode, blocks, activation, traffic):
    def run(tokens, wi, wo, ids, weights, extra):
        return fused_ep_moe(
            tokens,
            wi,
            wo,
            Routing(ids, weights),
            mesh=mesh,
            activation=activation,
            block_sizes=blocks,
            interpret=interpreter(mode),
            backend="xla",
            traffic=traffic,
            **extra,
        )

    return jax.jit(run)


def check(
    case,
    mesh,
    ids,
    *,
    mode="on_wait",
    blocks=SMALL,
    activation="silu",
    extra=None,
    inputs=None,
    tolerance=None,
):
    """Runs the kernel in the interpreter and compares it with the float32 reference."""
    inputs = dict(inputs or case.inputs())
    extra = extra or {}
    weights = inputs.pop("weights")
    ids = jnp.asarray(ids, jnp.int32)
    out = compiled(mesh, mode, blocks, activation, False)(
        inputs["tokens"], inputs["wi"], inputs["wo"], ids, weights, extra
    )
    wide = {
        name: x if name in ("wi", "wo") and f"{name}_scale" in extra else x.astype(jnp.float32)
        for name, x in inputs.items()
    }
    ref = fused_ep_moe_reference(
        wide["tokens"],
        wide["wi"],
        wide["wo"],
        Routing(ids, weights),
        activation=activation,
        **extra,
    )
    assert out.dtype == inputs["tokens"].dtype
    assert out.shape == ref.shape
    error = relative_error(out, ref)
    assert error <= (tolerance or TOLERANCE[case.dtype]), error
    if case.dtype == "bfloat16" and out.size >= 2048:
        assert abs(shrinkage(out, ref)) < 6e-4  # to nearest; cutting off shrinks by 1.4e-3
    return out

"""Layers that other libraries test their mixtures of experts on, for the backends of ours.

Each has the size it was published with, for GPUs, and a small one of the same kind, for CPUs.
Sources: SonicMoE (tests/moe_test.py), ScatterMoE (tests/test_mlp.py), MSLK (grouped products with
bias and token weights, in test/gemm/triton/grouped_gemm_test.py). Inputs are scaled so that
outputs have order 1: at 0.02 times normal inputs, as SonicMoE's are, a wrong tile goes unseen.
"""

import functools
import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.activations import resolve_activation
from moe_flax.experts import expert_ffn
from moe_flax.routing import Routing

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
_NAMES = ("tokens", "wi", "wo", "weights", "wi_bias", "wo_bias")


class Layer(tp.NamedTuple):
    """T tokens, E experts, K a token, D features, F hidden features."""

    tokens: int
    experts: int
    top_k: int
    features: int
    hidden: int
    bias: bool
    dtype: str


_SONIC = (  # D, F, E, K
    *((768, 256, 128, 8), (768, 512, 64, 4), (768, 1024, 32, 2)),
    *((1536, 256, 128, 8), (1536, 512, 64, 4), (1536, 1024, 32, 2)),
    *((4096, 256, 256, 16), (4096, 512, 128, 8), (4096, 1024, 64, 4)),
    *((4096, 512, 256, 16), (4096, 1024, 128, 8), (4096, 2048, 64, 4)),
)


def _layers() -> dict[str, Layer]:
    found = {}
    for (d, f, e, k), bias in itertools.product(_SONIC, (False, True)):
        layer = Layer(8192, e, k, d, f, bias, "bfloat16")
        found[f"sonic {d} {f} {e} {k} {'bias' if bias else 'plain'}"] = layer
    for t, d, k, bias in itertools.product(
        (1, 256, 512), (128, 256, 512, 600, 100), (2, 3, 4), (False, True)
    ):
        layer = Layer(t, 8, k, d, 4 * d // k, bias, "float32")
        found[f"scatter {t} {d} {k} {'bias' if bias else 'plain'}"] = layer
    for e, t, width in itertools.product((1, 4, 16, 128), (128, 2048, 16384), (256, 257)):
        found[f"mslk {e} {t} {width}"] = Layer(t, e, 1, width, width, True, "bfloat16")
    return found


LAYERS = _layers()


def smaller(layer: Layer) -> Layer:
    """Tokens, features and hidden features cut down; odd ones stay odd, a single token alone."""

    def cut(size: int) -> int:
        return 32 if size % 128 == 0 else 20 if size % 4 == 0 else 33

    sizes = {"features": cut(layer.features), "hidden": cut(layer.hidden)}
    return layer._replace(tokens=min(layer.tokens, 40), **sizes)


def operands(layer: Layer) -> tuple[list, np.ndarray, jax.Array]:
    """Six arrays in the order of `_NAMES` (biases None where there are none), ids, a cotangent."""
    t, e, k, d, f, bias, dtype = layer
    keys = jax.random.split(jax.random.key(t + e), 8)

    def normal(key, *shape, scale=1.0):
        return (jax.random.normal(keys[key], shape) * scale).astype(dtype)

    scores, ids = jax.lax.top_k(jax.random.normal(keys[0], (t, e)), k)
    floats = [
        normal(1, t, d),
        normal(2, e, 2, d, f, scale=1.5 * d**-0.5),
        normal(3, e, f, d, scale=1.5 * f**-0.5),
        jax.nn.softmax(scores) + 0.5,
        normal(4, e, 2, f) if bias else None,
        normal(5, e, d) if bias else None,
    ]
    return floats, np.asarray(ids), normal(6, t, d)


def padded_ffn(floats, ids: np.ndarray, activation: str) -> jax.Array:
    """The layer in float32 by dense products: each expert's tokens padded to the longest load."""
    tokens, wi, wo, weights, wi_bias, wo_bias = (
        None if x is None else x.astype(jnp.float32) for x in floats
    )
    experts, k = wi.shape[0], ids.shape[1]
    order = np.argsort(ids.ravel(), kind="stable")
    load = np.bincount(ids.ravel(), minlength=experts)
    first = np.cumsum(load) - load
    place = np.empty(ids.size, int)  # of a slot among its expert's
    place[order] = np.arange(ids.size) - first[ids.ravel()[order]]
    token = np.zeros((experts, load.max()), int)
    token[ids.ravel(), place] = np.arange(ids.size) // k
    hidden = jnp.einsum("ecd,ejdf->ecjf", tokens[token], wi)
    hidden = hidden if wi_bias is None else hidden + wi_bias[:, None]
    rows = jnp.einsum("ecf,efd->ecd", resolve_activation(activation)(hidden), wo)
    rows = rows if wo_bias is None else rows + wo_bias[:, None]
    return jnp.einsum("tkd,tk->td", rows[ids, place.reshape(ids.shape)], weights)


@functools.partial(jax.jit, static_argnames="backend")
def _ours(floats, ids, cotangent, backend):
    def call(tokens, wi, wo, weights, wi_bias, wo_bias):
        routing = Routing(ids, weights)
        return expert_ffn(
            tokens, wi, wo, routing, wi_bias=wi_bias, wo_bias=wo_bias, backend=backend
        )

    y, pull = jax.vjp(call, *floats)
    return y, *pull(cotangent)


def _wanted(floats, ids, cotangent):
    with jax.default_matmul_precision("highest"):
        wide = [None if x is None else x.astype(jnp.float32) for x in floats]
        y, pull = jax.vjp(lambda *f: padded_ffn(f, ids, "silu"), *wide)
        return y, *pull(cotangent.astype(jnp.float32))


def distance(actual, wanted) -> float:
    """Relative norm of the difference, on the device."""
    wanted = wanted.astype(jnp.float32)
    difference = jnp.linalg.norm((actual.astype(jnp.float32) - wanted).ravel())
    return float(difference / jnp.linalg.norm(wanted.ravel()))


class PublishedLayers:
    """For a backend's class of tests."""

    backend: str
    full_size = False

    @pytest.mark.slow
    @pytest.mark.parametrize("name", LAYERS)
    def test_published_layers(self, name):
        layer = LAYERS[name] if self.full_size else smaller(LAYERS[name])
        floats, ids, cotangent = operands(layer)
        with jax.default_matmul_precision("highest"):
            actual = _ours(floats, ids, cotangent, self.backend)
        wanted = _wanted(floats, ids, cotangent)
        for what, a, w in zip(("output", *_NAMES), actual, wanted, strict=True):
            assert (a is None) == (w is None), what
            if a is not None:
                assert distance(a, w) < TOLERANCE[layer.dtype], what

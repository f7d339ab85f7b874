"""Router logits to the fused kernel, against the same by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_ep_case import SMALL, Case, interpreter, make_mesh, relative_error

from moe_flax.config import RouterConfig
from moe_flax.kernels.fused_ep import fused_ep_moe_from_logits, fused_ep_moe_reference
from moe_flax.routing import route

CASE = Case(tokens=13, experts=8, k=3, features=128, hidden=128, dtype="float32")


def arrays():
    inputs = CASE.inputs()
    logits = 2 * jax.random.normal(jax.random.key(5), (CASE.tokens, CASE.experts))
    return inputs["tokens"], inputs["wi"], inputs["wo"], logits


def by_hand(tokens, wi, wo, logits, renormalize):
    """Every token through every expert, weighed by its softmax scores; no sort, no slots."""
    scores = jax.nn.softmax(logits)
    kth = jnp.sort(scores, axis=-1)[:, -CASE.k][:, None]
    weights = jnp.where(scores >= kth, scores, 0)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    with jax.default_matmul_precision("highest"):
        gate, up = jnp.einsum("td,ejdf->jetf", tokens, wi)
        return jnp.einsum("te,etf,efd->td", weights, jax.nn.silu(gate) * up, wo)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_top_k_against_every_expert(renormalize):
    """The fallback's path on any platform; the kernel's own is below."""
    x, wi, wo, logits = arrays()
    mesh = make_mesh(expert=4)

    def ours(logits):
        return fused_ep_moe_from_logits(
            x, wi, wo, logits, CASE.k, renormalize=renormalize, mesh=mesh, method="replicated"
        )

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda logits: jnp.sum(jnp.sin(function(logits)))))

    out, grad = loss(ours)(logits)
    ref, ref_grad = loss(lambda logits: by_hand(x, wi, wo, logits, renormalize))(logits)
    np.testing.assert_allclose(out, ref, rtol=1e-5)
    assert relative_error(grad, ref_grad) < 1e-5


@pytest.mark.slow
def test_equals_route_and_the_reference():
    x, wi, wo, logits = arrays()
    options = {"mesh": make_mesh(expert=2), "block_sizes": SMALL, "interpret": interpreter()}
    out = fused_ep_moe_from_logits(x, wi, wo, logits, CASE.k, renormalize=True, **options)
    routing = route(logits, RouterConfig(renormalize=True), CASE.k)
    assert relative_error(out, fused_ep_moe_reference(x, wi, wo, routing)) < 1e-5


def test_wrong_logits():
    x, wi, wo, logits = arrays()
    mesh = make_mesh(expert=2)
    with pytest.raises(ValueError, match=r"logits must have shape \[T, E\] = \(13, 8\), got"):
        fused_ep_moe_from_logits(x, wi, wo, logits[:, :4], 2, mesh=mesh)
    with pytest.raises(ValueError, match="9"):
        fused_ep_moe_from_logits(x, wi, wo, logits, 9, mesh=mesh)

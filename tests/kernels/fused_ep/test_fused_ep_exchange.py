"""What no run can show: barriers that hold whatever the devices' pace is."""

import jax
import jax.numpy as jnp
import pytest
from fused_ep_case import SMALL, Case, make_mesh

from moe_flax.kernels.fused_ep import fused_ep_moe
from moe_flax.routing import Routing


def inner(equation):
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def walk(jaxpr):
    """All equations in the order of the program, those inside of another after it."""
    for equation in jaxpr.eqns:
        yield equation
        for each in inner(equation):
            yield from walk(each)


def kernels(mesh, case, backend="reference"):
    inputs = case.inputs()
    ids = jnp.asarray(case.routings(mesh.shape["expert"])["random"])

    def loss(tokens, wi):
        out = fused_ep_moe(
            tokens,
            wi,
            inputs["wo"],
            Routing(ids, inputs["weights"]),
            mesh=mesh,
            block_sizes=SMALL,
            method="fused",
            backend=backend,
        )
        return jnp.sum(out.astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(inputs["tokens"], inputs["wi"])
    calls = [e.params["jaxpr"] for e in walk(jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    return [call for call in calls if any(map(remote, walk(call)))]  # packing sends nothing


def remote(equation):
    return equation.primitive.name == "dma_start" and "'expert'" in str(equation.params["tree"])


def test_a_backend_that_the_tpu_compiler_fails_on_is_refused():
    with pytest.raises(ValueError, match="take backend='auto' or 'tpu'"):
        kernels(make_mesh(expert=2), Case(tokens=8, experts=8), backend="xla")


@pytest.mark.parametrize("devices", [2, 4])
def test_barriers_enclose_every_copy(devices):
    """No row sets out before all devices are in, none leaves before its last copy is waited for.

    Devices that happen to keep pace pass the interpreter without either barrier.
    """
    found = kernels(make_mesh(expert=devices), Case(tokens=8, experts=8))
    assert len(found) == 3  # the fused FFN; the backward pass' dispatch and return
    # Waits after the last remote copy: sent, returned, home; arrived, sent; returned, home.
    for jaxpr, waits in zip(found, (3, 2, 2), strict=True):
        events = [
            ("remote" if remote(e) else e.primitive.name, e)
            for e in walk(jaxpr)
            if remote(e) or e.primitive.name in ("semaphore_signal", "semaphore_wait", "dma_wait")
        ]
        names = [name for name, _ in events]
        assert names[:2] == names[-2:] == ["semaphore_signal", "semaphore_wait"]
        assert {"remote", "dma_wait"} == set(names[2:-2])
        assert names[-2 - waits : -2] == ["dma_wait"] * waits
        assert names[-3 - waits] == "remote"
        barriers = [str(e.invars[0].aval) for _, e in events[:2] + events[-2:]]
        assert ["barrier" in kind for kind in barriers] == [True, True, False, False]
        assert [int(e.invars[1].val) for _, e in (events[1], events[-1])] == [devices, devices]

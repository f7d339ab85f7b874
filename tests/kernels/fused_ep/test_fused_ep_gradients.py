"""The gradient of the fused FFN against that of the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_ep_case import SMALL, Case, interpreter, make_mesh, relative_error

from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe, fused_ep_moe_reference
from moe_flax.routing import Routing


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def gradients(case, mesh, ids, blocks=SMALL, backend="reference"):
    inputs = {k: v.astype(jnp.float32) if k == "weights" else v for k, v in case.inputs().items()}
    inputs |= case.biases()
    ids = jnp.asarray(ids)
    weight = jax.random.normal(jax.random.key(9), (case.tokens, case.features))

    def loss(function, cast, inputs, **options):
        inputs = {k: v.astype(cast) if cast else v for k, v in inputs.items()}
        routing = Routing(ids, inputs.pop("weights"))
        names = ("tokens", "wi", "wo")
        arrays = [inputs.pop(name) for name in names]
        out = function(*arrays, routing, **inputs, **options)
        return jnp.sum(out.astype(jnp.float32) * weight)

    def ours(inputs):
        return loss(
            fused_ep_moe,
            None,
            inputs,
            mesh=mesh,
            block_sizes=blocks,
            interpret=interpreter(),
            backend=backend,
        )

    out = jax.jit(jax.grad(ours))(inputs)
    ref = jax.grad(lambda inputs: loss(fused_ep_moe_reference, jnp.float32, inputs))(inputs)
    return out, ref


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.interpret),
    ],
)
def test_every_operand(dtype):
    case = Case(tokens=32, experts=8, dtype=dtype)
    ids = case.routings(4)["half_dropped"]
    out, ref = gradients(case, make_mesh(data=2, expert=2), ids)
    for name in ref:
        assert relative_error(out[name], ref[name]) <= {"float32": 1e-5, "bfloat16": 8e-3}[dtype], (
            name
        )


@pytest.mark.slow
def test_in_passes_with_a_tensor_axis():
    case = Case(tokens=24, experts=4, k=2, features=100, hidden=128, dtype="float32")
    blocks = BlockSizes(rows=16, hidden=128, features=128, receive_rows=10)
    ids = case.routings(2)["random"]
    out, ref = gradients(case, make_mesh(expert=2, tensor=2), ids, blocks)
    for name in ref:
        assert relative_error(out[name], ref[name]) <= 1e-5, name


@pytest.mark.slow
def test_an_expert_without_rows_has_no_gradient():
    case = Case(tokens=16, experts=4, k=1, dtype="float32")
    out, _ = gradients(case, make_mesh(expert=2), np.full((16, 1), 3))
    for name in ("wi", "wo", "wi_bias", "wo_bias"):
        assert not np.any(np.asarray(out[name])[:3])
        assert np.any(np.asarray(out[name])[3])


@pytest.mark.parametrize(
    "backend",
    [pytest.param("cpu", marks=pytest.mark.interpret)]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("tpu", "reference")],
)
def test_what_lies_past_the_last_row_is_not_looked_at(backend):
    """The receive buffer starts as NaN and most of it stays so; padding is not computed with."""
    case = Case(tokens=8, experts=4, k=2, features=100, hidden=100, dtype="float32")
    ids = np.full((8, 2), 4)
    ids[::2, 0] = [0, 3, 3, 2]
    out, ref = gradients(case, make_mesh(expert=2), ids, backend=backend)
    for name in ref:
        assert relative_error(out[name], ref[name]) <= 1e-5, name


@pytest.mark.slow
def test_data_groups_of_different_numbers_of_passes():
    """Tokens of one data group all go to one device, those of the other to nobody."""
    case = Case(tokens=32, experts=4, k=2, features=100, hidden=100, dtype="float32")
    ids = np.full((32, 2), 4)
    ids[:16] = [2, 3]
    blocks = BlockSizes(rows=16, hidden=128, features=128, receive_rows=10)
    out, ref = gradients(case, make_mesh(data=2, expert=2), ids, blocks)
    for name in ref:
        assert relative_error(out[name], ref[name]) <= 1e-5, name

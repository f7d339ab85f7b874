"""One base of tests for every backend of `grouped_matmul`, over one list of arguments.

A backend's test is a class of a line or two: ``class TestCpu(GroupedMatmulBase): backend = "cpu"``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_flax.kernels.grouped_matmul import grouped_matmul

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: ``branches`` is None, "shared" (J matrices share lhs) or "summed"."""

    sizes: tuple[int, ...]
    rows: int
    k: int = 16
    n: int = 24
    transpose: bool = False
    branches: str | None = None
    dtype: str = "float32"
    out_dtype: str | None = None
    sizes_dtype: str = "int32"


CASES = {
    "plain": Case((5, 3, 8), 16),
    "transpose": Case((5, 3, 8), 16, transpose=True),
    "shared branches": Case((5, 0, 8), 16, branches="shared"),
    "shared branches, transpose": Case((5, 0, 8), 16, branches="shared", transpose=True),
    "summed branches": Case((5, 0, 8), 16, branches="summed"),
    "summed branches, transpose": Case((5, 0, 8), 16, branches="summed", transpose=True),
    "one group has all rows": Case((0, 0, 200, 0), 200),
    "one group of one": Case((37,), 37),
    "nothing in any group": Case((0, 0, 0), 9),
    "fewer rows than groups": Case((0, 1, 0, 0, 1, 0, 0), 3),
    "no rows": Case((0, 0), 0),
    "odd sizes": Case((3, 61, 0, 40, 25), 131, k=100, n=257),
    "long beside short": Case((300, 1, 2, 90), 400),
    "bfloat16": Case((20, 0, 31), 60, k=64, dtype="bfloat16"),
    "bfloat16 to float32": Case((20, 0, 31), 60, k=64, dtype="bfloat16", out_dtype="float32"),
    "float16": Case((20, 0, 31), 60, k=64, dtype="float16", branches="shared"),
    "float32 to bfloat16": Case((20, 0, 31), 60, k=64, out_dtype="bfloat16"),
    "sizes of int8 past 127 in all": Case((100, 100), 210, sizes_dtype="int8"),
    "257 x 451": Case((20, 0, 31), 60, k=257, n=451, dtype="bfloat16"),
    "264 x 264": Case((20, 0, 31), 60, k=264, n=264, dtype="bfloat16", transpose=True),
    "512 groups": Case((0, 2, 0, 1) * 128, 400, k=8, n=12),
    "sizes of uint32": Case((7, 2), 10, sizes_dtype="uint32"),
}


def operands(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """lhs, rhs and the result's cotangent in float64; rows past the end are NaN in both."""
    rng = np.random.default_rng(seed)
    j = (2,) if case.branches else ()
    matrix = (case.n, case.k) if case.transpose else (case.k, case.n)
    lhs = rng.normal(size=(case.rows, *(j if case.branches == "summed" else ()), case.k))
    rhs = rng.normal(size=(len(case.sizes), *j, *matrix)) / np.sqrt(case.k)
    grad = rng.normal(size=(case.rows, *(j if case.branches == "shared" else ()), case.n))
    lhs[sum(case.sizes) :] = grad[sum(case.sizes) :] = np.nan
    return lhs, rhs, grad


def expected(lhs, rhs, grad, sizes, transpose: bool):
    """The product and both gradients, group by group in float64."""
    left = "mjk" if lhs.ndim == 3 else "mk"
    right = "jkn" if rhs.ndim == 4 else "kn"
    both = "mjn" if grad.ndim == 3 else "mn"
    matrices = np.swapaxes(rhs, -1, -2) if transpose else rhs
    out, lhs_grad, rhs_grad = np.zeros_like(grad), np.zeros_like(lhs), np.zeros_like(matrices)
    einsum = functools.partial(np.einsum, optimize=True)  # by BLAS
    start = 0
    for group, size in enumerate(sizes):
        at = slice(start, start + size)
        out[at] = einsum(f"{left},{right}->{both}", lhs[at], matrices[group])
        lhs_grad[at] = einsum(f"{both},{right}->{left}", grad[at], matrices[group])
        rhs_grad[group] = einsum(f"{left},{both}->{right}", lhs[at], grad[at])
        start += size
    return out, lhs_grad, np.swapaxes(rhs_grad, -1, -2) if transpose else rhs_grad


def distance(actual, wanted) -> float:
    """Relative norm of the difference; NaN anywhere makes it NaN."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / max(np.linalg.norm(wanted), 1e-30))


@functools.partial(jax.jit, static_argnames=("transpose", "out_dtype", "backend"))
def product_and_gradients(lhs, rhs, grad, sizes, *, transpose=False, out_dtype=None, backend):
    def product(lhs, rhs):
        return grouped_matmul(
            lhs,
            rhs,
            sizes,
            transpose_rhs=transpose,
            preferred_element_type=out_dtype,
            backend=backend,
        )

    out, pull = jax.vjp(product, lhs, rhs)
    return out, *pull(grad.astype(out.dtype))


class GroupedMatmulBase:
    """Tests that hold for every backend."""

    backend: str

    def product(self, lhs, rhs, sizes, **keywords):
        return grouped_matmul(lhs, rhs, sizes, backend=self.backend, **keywords)

    @pytest.mark.parametrize("name", CASES)
    def test_product_and_gradients(self, name):
        case = CASES[name]
        lhs, rhs = (jnp.asarray(x, case.dtype) for x in operands(case)[:2])
        out_dtype = case.out_dtype or case.dtype
        grad = jnp.asarray(operands(case)[2], out_dtype)
        sizes = jnp.asarray(case.sizes, case.sizes_dtype)
        actual = product_and_gradients(
            lhs,
            rhs,
            grad,
            sizes,
            transpose=case.transpose,
            out_dtype=case.out_dtype,
            backend=self.backend,
        )
        rounded = (np.asarray(x, np.float64) for x in (lhs, rhs, grad))
        wanted = expected(*rounded, case.sizes, case.transpose)
        assert [x.dtype for x in actual] == [jnp.dtype(out_dtype), lhs.dtype, rhs.dtype]
        tolerance = max(TOLERANCE[case.dtype], TOLERANCE[out_dtype])
        for a, w in zip(actual, wanted, strict=True):
            assert distance(a, w) < tolerance

    def test_every_mask_of_empty_groups(self):
        case = Case((3, 1, 4, 2, 5, 1, 2, 3), 24, k=6, n=10)
        for mask in range(2**8):
            sizes = tuple(s if mask >> g & 1 else 0 for g, s in enumerate(case.sizes))
            lhs, rhs, grad = operands(dataclasses.replace(case, sizes=sizes), seed=mask)
            actual = product_and_gradients(
                jnp.asarray(lhs, jnp.float32),
                jnp.asarray(rhs, jnp.float32),
                jnp.asarray(grad, jnp.float32),
                jnp.asarray(sizes),
                backend=self.backend,
            )
            for a, w in zip(actual, expected(lhs, rhs, grad, sizes, False), strict=True):
                assert distance(a, w) < 2e-6, sizes
            out, lhs_grad, rhs_grad = (np.asarray(x) for x in actual)
            assert not out[sum(sizes) :].any(), sizes
            assert not lhs_grad[sum(sizes) :].any(), sizes
            assert not rhs_grad[np.asarray(sizes) == 0].any(), sizes

    @pytest.mark.parametrize("k", [100, 256, 257])
    def test_identity_matrices_copy_every_bit(self, k):
        rng = np.random.default_rng(0)
        lhs = jnp.asarray(rng.normal(size=(60, k)), jnp.bfloat16)
        sizes = jnp.array([20, 0, 31])
        eye = jnp.broadcast_to(jnp.eye(k, dtype=jnp.bfloat16), (3, k, k))
        out = np.asarray(self.product(lhs.at[51:].set(jnp.nan), eye, sizes), np.float32)
        np.testing.assert_array_equal(out[:51], np.asarray(lhs, np.float32)[:51])
        assert not out[51:].any()

    def test_a_nan_row_spoils_itself_only(self):
        lhs, rhs, _ = operands(CASES["plain"])
        clean = np.asarray(self.product(jnp.float32(lhs), jnp.float32(rhs), jnp.array([5, 3, 8])))
        lhs[2] = np.nan
        spoilt = self.product(jnp.float32(lhs), jnp.float32(rhs), jnp.array([5, 3, 8]))
        kept = np.array([0, 1, *range(3, 16)])
        np.testing.assert_array_equal(np.asarray(spoilt)[kept], clean[kept])
        assert np.isnan(np.asarray(spoilt)[2]).all()

    def test_same_bits_twice(self):
        lhs, rhs, grad = (jnp.asarray(x, jnp.float32) for x in operands(CASES["odd sizes"]))
        sizes = jnp.asarray(CASES["odd sizes"].sizes)
        first, second = (
            product_and_gradients(lhs, rhs, grad, sizes, backend=self.backend) for _ in range(2)
        )
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    def test_second_gradients(self):
        lhs, rhs, _ = (jnp.asarray(x, jnp.float32) for x in operands(CASES["shared branches"]))

        def penalty(lhs, rhs, backend):
            def loss(lhs, rhs):
                out = grouped_matmul(lhs, rhs, jnp.array([5, 0, 8]), backend=backend)
                return jnp.sum(jnp.sin(out))

            first = jax.grad(loss, (0, 1))(lhs, rhs)
            return sum(jnp.sum(jnp.sin(x)) for x in first)

        second = jax.jit(jax.grad(penalty, (0, 1)), static_argnums=2)
        actual, wanted = second(lhs, rhs, self.backend), second(lhs, rhs, "reference")
        for a, w in zip(actual, wanted, strict=True):
            assert distance(a, w) < 2e-6

    def test_scan_and_checkpoint(self):
        rng = np.random.default_rng(0)
        layers = jnp.asarray(rng.normal(size=(3, 4, 8, 8)) / 3, jnp.float32)
        x = jnp.asarray(rng.normal(size=(10, 8)), jnp.float32)
        sizes = jnp.array([2, 0, 5, 3])

        def scanned(layers):
            @jax.checkpoint
            def step(x, layer):
                return jnp.tanh(self.product(x, layer, sizes)), None

            return jnp.sum(jax.lax.scan(step, x, layers)[0])

        def unrolled(layers):
            y = x
            for layer in layers:
                y = jnp.tanh(grouped_matmul(y, layer, sizes, backend="reference"))
            return jnp.sum(y)

        actual, wanted = (jax.jit(jax.grad(f))(layers) for f in (scanned, unrolled))
        assert distance(actual, wanted) < 2e-6

    @pytest.mark.parametrize("batched", ["all", "sizes"])
    def test_vmap(self, batched):
        rng = np.random.default_rng(0)
        lhs = jnp.asarray(rng.normal(size=(3, 10, 8)), jnp.float32)
        rhs = jnp.asarray(rng.normal(size=(3, 4, 8, 6)), jnp.float32)
        sizes = jnp.array([[2, 0, 5, 3], [0, 0, 0, 9], [1, 2, 3, 4]])
        axes = {"all": (0, 0, 0), "sizes": (None, None, 0)}[batched]
        given = [x if a == 0 else x[0] for x, a in zip((lhs, rhs, sizes), axes, strict=True)]

        def gradients(lhs, rhs, sizes):
            def loss(lhs, rhs):
                return jnp.sum(jnp.sin(self.product(lhs, rhs, sizes)))

            return jax.grad(loss, (0, 1))(lhs, rhs)

        actual = jax.jit(jax.vmap(gradients, in_axes=axes))(*given)
        for i in range(3):
            one = gradients(*(x[i] if a == 0 else x for x, a in zip(given, axes, strict=True)))
            for a, w in zip(actual, one, strict=True):
                assert distance(a[i], w) < 2e-6

    def test_shard_map(self):
        """Rows sharded over one axis and matrices over another, under the varying-axes check."""
        shards, halves = (4, 2) if jax.device_count() >= 8 else (1, 1)
        devices = jax.devices()[: shards * halves]
        mesh = jax.make_mesh((shards, halves), ("data", "expert"), devices=devices)
        rng = np.random.default_rng(0)
        lhs = jnp.asarray(rng.normal(size=(shards * 10, 8)), jnp.float32)
        rhs = jnp.asarray(rng.normal(size=(halves * 3, 8, 6)), jnp.float32)
        sizes = jnp.asarray(rng.integers(0, 4, size=(shards, 3)))

        def local(lhs, rhs, sizes):
            out = jnp.sin(self.product(lhs, rhs, sizes[0]))
            return jax.lax.psum(jnp.sum(out), ("data", "expert"))

        def sharded(lhs, rhs):
            specs = (P("data"), P("expert"), P("data"))
            places = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
            given = [jax.device_put(x, s) for x, s in zip((lhs, rhs, sizes), places, strict=True)]
            return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(*given)

        def plain(lhs, rhs):
            total = 0.0
            for shard in range(shards):
                for half in range(halves):
                    rows, matrices = lhs[10 * shard :][:10], rhs[3 * half :][:3]
                    out = grouped_matmul(rows, matrices, sizes[shard], backend="reference")
                    total += jnp.sum(jnp.sin(out))
            return total

        actual, wanted = (
            jax.jit(jax.value_and_grad(f, (0, 1)))(lhs, rhs) for f in (sharded, plain)
        )
        for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            assert distance(a, w) < 5e-6

"""Shapes that other libraries test their grouped products on, for the backends of ours.

Each has the size it was published with, for GPUs, and a small one of the same kind (odd stays odd,
a multiple of 8 one, groups as many), for CPUs. Sources: MSLK (test/gemm/triton/grouped_gemm_test.py
and test/gemm/gemm_test.py, the wider grids of before July 2026), tokamax (ragged_dot tests and
benchmarks), TransformerEngine's JAX tests of its grouped dense.
"""

import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_base import (
    TOLERANCE,
    Case,
    distance,
    expected,
    operands,
    product_and_gradients,
)


class Grid(tp.NamedTuple):
    """A call: ``empty`` groups get no rows, the others random shares; None is one row a group."""

    groups: int
    rows: int
    n: int
    k: int
    dtype: str = "bfloat16"
    transpose: bool = False
    empty: tuple[int, ...] | None = ()


# groups, rows, N, K
_MSLK_TRAINING = (
    (1, 257, 256, 128),
    (2, 257, 256, 128),
    (16, 2049, 2048, 1024),
    (64, 2049, 2048, 1024),
    (2, 0, 256, 128),
)
_TRANSFORMER_ENGINE = ((5, 32, 128, 64), (8, 64, 32, 128), (8, 64, 128, 256), (4, 4, 128, 128))
_TOKAMAX = {
    "mixtral": Grid(8, 8192, 14336, 4096),
    "deepseek-v3 up": Grid(256, 131072, 1024, 7168),
    "deepseek-v3 down": Grid(256, 262144, 7168, 512),
    "all rows in one of 8": Grid(8, 4096, 1024, 2048, empty=(0, 1, 2, 4, 5, 6, 7)),
    "one row a group": Grid(256, 256, 1024, 2048, empty=None),
}


def _grids() -> dict[str, Grid]:
    found = {}
    for groups, rows, n, k in itertools.product(
        (1, 4, 16, 128), (0, 128, 2048, 16384), (256, 451), (100, 256, 257)
    ):
        found[f"mslk {groups} {rows} {n} {k}"] = Grid(groups, rows, n, k)
    for shape, dtype in itertools.product(_MSLK_TRAINING, ("bfloat16", "float16")):
        name = f"mslk training {' '.join(map(str, shape))} {dtype}"
        found[name] = Grid(*shape, dtype=dtype, transpose=True)
    found["mslk no tokens at all"] = Grid(8, 100, 256, 128, empty=tuple(range(8)))
    found["mslk tokens at 0, 3, 5"] = Grid(8, 100, 2048, 1024, empty=(1, 2, 4, 6, 7))
    for (groups, rows, n, k), dtype in itertools.product(
        _TRANSFORMER_ENGINE, ("bfloat16", "float16")
    ):
        name = f"transformer engine {groups} {rows} {n} {k} {dtype}"
        found[name] = Grid(groups, 32 * rows, n, k, dtype, empty=(1,))
    return found


GRIDS = _grids()


def _smaller(size: int) -> int:
    """Multiples of 128 become 32, other multiples of 4 become 20, odd sizes 33."""
    return 32 if size % 128 == 0 else 20 if size % 4 == 0 else 33


def to_case(grid: Grid, full: bool) -> Case:
    """The case of a grid's cell, at its published or its small size."""
    rows, n, k = grid.rows, grid.n, grid.k
    if not full:
        rows, n, k = min(rows, grid.groups if grid.empty is None else 61), _smaller(n), _smaller(k)
    if grid.empty is None:
        sizes = np.ones(grid.groups, int)
    else:
        chosen = [g for g in range(grid.groups) if g not in grid.empty]
        rng = np.random.default_rng(grid.groups + grid.rows)
        sizes = np.zeros(grid.groups, int)
        if chosen:
            bounds = np.sort(rng.integers(0, rows + 1, len(chosen) - 1))
            sizes[chosen] = np.diff(np.concatenate([[0], bounds, [rows]]))
    return Case(tuple(sizes.tolist()), rows, k, n, transpose=grid.transpose, dtype=grid.dtype)


class PublishedGrids:
    """For a backend's class of tests, beside `GroupedMatmulBase`."""

    backend: str
    full_size = False

    def gradients(self, case: Case, lhs, rhs, grad):
        """The product and both gradients."""
        sizes = jnp.asarray(case.sizes)
        transpose = case.transpose
        return product_and_gradients(
            lhs, rhs, grad, sizes, transpose=transpose, backend=self.backend
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("name", GRIDS)
    def test_published_shapes(self, name):
        case = to_case(GRIDS[name], self.full_size)
        given = [jnp.asarray(x, case.dtype) for x in operands(case)]
        actual = self.gradients(case, *given)
        wide = [np.asarray(x, np.float64) for x in given]
        wanted = expected(*wide, case.sizes, case.transpose)
        for a, w in zip(actual, wanted, strict=True):
            assert distance(a, w) < TOLERANCE[case.dtype]
        assert not np.asarray(actual[2], np.float32)[np.asarray(case.sizes) == 0].any()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", _TOKAMAX)
    def test_large_published_shapes_on_samples(self, name):
        """Some rows, columns and groups of each result: the whole would not fit in float64."""
        case = to_case(_TOKAMAX[name], self.full_size)
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (case.rows, case.k), (len(case.sizes), case.k, case.n), (case.rows, case.n)
        lhs, rhs, grad = (
            jax.random.normal(key, shape, case.dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )
        actual = self.gradients(case, lhs, rhs, grad)
        rng = np.random.default_rng(1)
        rows, ks, ns = (
            np.sort(rng.choice(size, min(size, 24), replace=False))
            for size in (case.rows, case.k, case.n)
        )
        ends = np.cumsum(case.sizes)
        groups = np.searchsorted(ends, rows, side="right")

        def wide(x):
            return np.asarray(x, np.float64)

        out = np.einsum("rk,rkn->rn", wide(lhs[rows]), wide(rhs[groups][:, :, ns]))
        assert distance(wide(actual[0][rows][:, ns]), out) < TOLERANCE[case.dtype]
        lhs_grad = np.einsum("rn,rkn->rk", wide(grad[rows]), wide(rhs[groups][:, ks]))
        assert distance(wide(actual[1][rows][:, ks]), lhs_grad) < TOLERANCE[case.dtype]
        for group in (int(np.argmax(case.sizes)), len(case.sizes) - 1):
            at = slice(int(ends[group]) - case.sizes[group], int(ends[group]))
            rhs_grad = wide(lhs[at][:, ks]).T @ wide(grad[at][:, ns])
            found = wide(actual[2][group][ks][:, ns])
            assert distance(found, rhs_grad) < TOLERANCE[case.dtype]

"""The TPU backend: XLA's part of it on CPU, and megablox' kernels in Pallas' interpreter."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_base import CASES, Case, GroupedMatmulBase, distance, expected, operands

from moe_flax.compile_report import _topology_devices
from moe_flax.kernels.grouped_matmul import grouped_matmul, tpu


class TestTpu(GroupedMatmulBase):
    backend = "tpu"


def run_interpreted(kernel, fallback, *arrays):
    del fallback
    return kernel(*arrays, interpret=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Has the kernels run, as on one device; whatever was traced before is forgotten."""
    monkeypatch.setattr(tpu, "_by_platform", run_interpreted)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def check(case, seed=0):
    """Product, gradient by lhs and gradient by rhs against float64; zeros where they must be."""
    lhs, rhs, grad = (jnp.asarray(x, jnp.bfloat16) for x in operands(case, seed))
    sizes = jnp.asarray(case.sizes, jnp.int32)
    product = functools.partial(tpu.grouped_product, group_sizes=sizes)
    found = (
        product(lhs, rhs, transpose_rhs=case.transpose, preferred_element_type=jnp.bfloat16),
        product(grad, rhs, transpose_rhs=not case.transpose, preferred_element_type=jnp.bfloat16),
        tpu.row_contraction(*((grad, lhs) if case.transpose else (lhs, grad)), sizes, jnp.float32),
    )
    exact = [np.asarray(x, np.float64) for x in (lhs, rhs, grad)]
    for a, wanted in zip(found, expected(*exact, case.sizes, case.transpose), strict=True):
        if np.any(wanted):
            assert distance(a, wanted) < 8e-3
        else:
            assert not np.asarray(a, np.float32).any()
    end = sum(case.sizes)
    assert not np.asarray(found[0][end:], np.float32).any()
    assert not np.asarray(found[1][end:], np.float32).any()
    assert not np.asarray(found[2])[np.asarray(case.sizes) == 0].any()


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.rows and c.dtype != "float16"])
def test_kernels_equal_the_reference(interpreted, name):
    check(CASES[name])


@pytest.mark.parametrize("mask", range(0, 256, 15))
def test_empty_groups(interpreted, mask):
    check(Case(tuple(37 * (mask >> bit & 1) for bit in range(8)), 300, k=128, n=136))


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.data())
def test_any_sizes(data):
    sizes = tuple(data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=5)))
    rows = sum(sizes) + data.draw(st.integers(0, 150))
    k, n = (data.draw(st.integers(1, 300)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "_by_platform", run_interpreted)
        patch.setattr(jax, "device_count", lambda: 1)
        if rows:
            check(Case(sizes, rows, k, n, data.draw(st.booleans())))


def test_xla_where_the_kernels_cannot_run(monkeypatch):
    """On several devices outside shard_map, and for float32."""
    asked = []
    monkeypatch.setattr(tpu, "_by_platform", lambda k, f, *xs: asked.append(1) or f(*xs))
    lhs, rhs = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((1, 4, 4), jnp.bfloat16)
    sizes = jnp.array([8])
    tpu.grouped_product(lhs, rhs, sizes, False, jnp.bfloat16)
    assert jax.device_count() > 1
    assert not asked
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tpu.grouped_product(lhs, rhs, sizes, False, jnp.bfloat16)
    assert len(asked) == 1
    tpu.grouped_product(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes, False, jnp.float32)
    assert len(asked) == 1


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(("k", "n", "rows"), [(2048, 768, 8192), (100, 2880, 200)])
def test_real_compiles(topology, k, n, rows):
    """Product and both gradients on devices that are not there: the kernels are what runs."""
    devices = _topology_devices(topology, topology.partition(":")[0])
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def gradients(lhs, rhs, grad, sizes):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="tpu"), lhs, rhs)
        return out, *pull(grad)

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    count = len(devices)

    def shape(*sizes, dtype=jnp.bfloat16):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((sizes[0] * count, *sizes[1:]), dtype, sharding=sharding)

    arguments = shape(rows, k), shape(8, k, n), shape(rows, n), shape(8, dtype=jnp.int32)
    lowered = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 3
    assert lowered.compile().memory_analysis() is not None


@pytest.mark.parametrize("k", [100, 768, 2048, 2880, 7168, 14336])
@pytest.mark.parametrize("n", [100, 768, 1536, 2048, 7168, 28672])
@pytest.mark.parametrize("average", [1, 64, 256, 4096])
def test_tilings_are_whole_lanes_and_fit(k, n, average):
    rows, groups = 32 * average, 32
    for tiling in (
        tpu.product_tiling(rows, groups, k, n),
        tpu.contraction_tiling(rows, groups, k, n),
    ):
        assert all(size % 128 == 0 for size in tiling)
        assert tiling[1] < k + 128
        assert tiling[2] < n + 128
    rows, depth, width = tpu.product_tiling(rows, groups, k, n)
    assert 4 * (rows * depth + depth * width + 2 * rows * width) <= 16 * 2**20

"""The contraction over each group's rows for Hopper: warp-specialised, tiles of 128 by 256.

The same function as contraction.py's kernel for 16-bit operands. As in hopper.py one partition of
warps loads ahead and two multiply, each for 64 rows of the result, so that the next tile's loads
hide behind the writing of this one. A group's last rows, where others follow in the same block of
64, are loaded by masked loads and written to the ring as zeros past the group's end.
"""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_flax.kernels.grouped_matmul.triton.hopper import _quarters, _store

DEPTH: gl.constexpr = gl.constexpr(64)  # rows contracted in a step
HEIGHT: gl.constexpr = gl.constexpr(128)
WIDTH: gl.constexpr = gl.constexpr(256)


@gluon.jit
def _find_tile(table_ptr, tile, K: gl.constexpr, N: gl.constexpr, BRANCHES: gl.constexpr,
               SPAN: gl.constexpr):  # fmt: skip
    """Tile number -> (group, branch, k, n, first row, end row); SPAN heights share columns."""
    COLUMN_BLOCKS: gl.constexpr = (N + WIDTH - 1) // WIDTH
    COLUMNS: gl.constexpr = COLUMN_BLOCKS * BRANCHES
    HEIGHTS: gl.constexpr = (K + HEIGHT - 1) // HEIGHT
    group = tile // (HEIGHTS * COLUMNS)
    inside = tile - group * HEIGHTS * COLUMNS
    band = inside // (SPAN * COLUMNS)
    height = gl.minimum(HEIGHTS - band * SPAN, SPAN)
    inside -= band * SPAN * COLUMNS
    k = (band * SPAN + inside % height) * HEIGHT
    column = inside // height
    branch = column // COLUMN_BLOCKS
    n = (column - branch * COLUMN_BLOCKS) * WIDTH
    begin = gl.load(table_ptr + 1 + group)
    end = gl.load(table_ptr + 2 + group)
    return group, branch, k, n, begin, end


@gluon.jit
def _copy_masked(source_ptr, pitch, row, end, column, limit, target):
    """Writes [64, 64] of a matrix to shared memory, zeros past the rows' end and the columns'."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ms = row + gl.arange(0, DEPTH, gl.SliceLayout(1, LAYOUT))
    ns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    pointers = source_ptr + (ms.to(gl.int64) * pitch)[:, None] + (column + ns)[None, :]
    mask = (ms < end)[:, None] & (ns < limit)[None, :]
    target.store(gl.load(pointers, mask=mask, other=0.0))


@gluon.jit
def _produce(
    lhs, grad, lhs_ptr, grad_ptr, table_ptr, a_rings, b_ring, ready, free,
    K: gl.constexpr, N: gl.constexpr, LHS_BRANCHES: gl.constexpr, GRAD_BRANCHES: gl.constexpr,
    SPAN: gl.constexpr, TILES: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = DEPTH * (HEIGHT + WIDTH) * 2
    CHUNKS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    step = 0
    for tile in range(gl.program_id(0), TILES, PROGRAMS):
        _, branch, k, n, begin, end = _find_tile(
            table_ptr, tile, K, N, LHS_BRANCHES * GRAD_BRANCHES, SPAN
        )
        left = k + (branch * K if LHS_BRANCHES > 1 else 0)
        right = n + (branch * N if GRAD_BRANCHES > 1 else 0)
        for row in range(begin, end, DEPTH):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            full = ready.index(stage)
            chunks = b_ring.index(stage)._reinterpret(grad.dtype, [4, DEPTH, 64], CHUNKS)
            if row + DEPTH <= end:
                mbarrier.expect(full, BYTES)
                for half in gl.static_range(2):
                    place = [row, left + half * 64]
                    tma.async_load(lhs, place, full, a_rings[half].index(stage))
                for c in gl.static_range(4):
                    tma.async_load(grad, [row, right + c * 64], full, chunks.index(c))
            else:
                for half in gl.static_range(2):
                    at = left + half * 64
                    target = a_rings[half].index(stage)
                    limit = K - k - half * 64
                    _copy_masked(lhs_ptr, LHS_BRANCHES * K, row, end, at, limit, target)
                for c in gl.static_range(4):
                    at = right + c * 64
                    target = chunks.index(c)
                    _copy_masked(grad_ptr, GRAD_BRANCHES * N, row, end, at, N - n - c * 64, target)
                fence_async_shared()
                mbarrier.arrive(full)
            step += 1


@gluon.jit
def _consume(
    INDEX: gl.constexpr, table_ptr, out_ptr, a_ring, b_ring, buffers, ready, free,
    K: gl.constexpr, N: gl.constexpr, BRANCHES: gl.constexpr, SPAN: gl.constexpr,
    TILES: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    buffer = buffers.index(INDEX)
    step = 0
    for tile in range(gl.program_id(0), TILES, PROGRAMS):
        group, branch, k, n, begin, end = _find_tile(table_ptr, tile, K, N, BRANCHES, SPAN)
        acc = gl.zeros([64, WIDTH], gl.float32, MMA)
        for row in range(begin, end, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            a = a_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the stage before is done with
            if row > begin:
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if end > begin:
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        q0, q1, q2, q3 = _quarters(acc)
        quarters = (q0, q1, q2, q3)
        out = out_ptr + (group * BRANCHES + branch).to(gl.int64) * (K * N)
        for c in gl.static_range(4):
            y = gl.convert_layout(quarters[c], PART, assert_trivial=True)
            _store(y, out, N, k + INDEX * 64, K, n + c * 64, buffer, N)


@gluon.jit
def specialised_contraction_kernel(
    lhs, grad, lhs_ptr, grad_ptr, table_ptr, out_ptr,
    K: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, LHS_BRANCHES: gl.constexpr,
    GRAD_BRANCHES: gl.constexpr, SPAN: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As contraction.py's kernel; lhs and grad are descriptors of [R, .. * K] and [R, .. * N]."""
    BRANCHES: gl.constexpr = LHS_BRANCHES * GRAD_BRANCHES
    HEIGHTS: gl.constexpr = (K + HEIGHT - 1) // HEIGHT
    TILES: gl.constexpr = GROUPS * BRANCHES * HEIGHTS * ((N + WIDTH - 1) // WIDTH)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a_rings = (
        gl.allocate_shared_memory(lhs.dtype, [STAGES, DEPTH, 64], SWIZZLED),
        gl.allocate_shared_memory(lhs.dtype, [STAGES, DEPTH, 64], SWIZZLED),
    )
    b_ring = gl.allocate_shared_memory(grad.dtype, [STAGES, DEPTH, WIDTH], SWIZZLED)
    buffers = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2, 64, 64], SWIZZLED)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, table_ptr, out_ptr, a_rings[0], b_ring, buffers, ready, free,
                K, N, BRANCHES, SPAN, TILES, PROGRAMS, STAGES,
            )),
            (_consume, (
                1, table_ptr, out_ptr, a_rings[1], b_ring, buffers, ready, free,
                K, N, BRANCHES, SPAN, TILES, PROGRAMS, STAGES,
            )),
            (_produce, (
                lhs, grad, lhs_ptr, grad_ptr, table_ptr, a_rings, b_ring, ready, free,
                K, N, LHS_BRANCHES, GRAD_BRANCHES, SPAN, TILES, PROGRAMS, STAGES,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip

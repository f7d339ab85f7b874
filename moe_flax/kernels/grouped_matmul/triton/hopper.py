"""The grouped product for Hopper: warp-specialised, tiles of 128 rows by 256 columns.

The same function as product.py's kernel for 16-bit operands whose K is a multiple of 64, and for
8-bit ones whose K is a multiple of 16 (transposed matrices only, as the chip asks). One
partition of warps loads (gathered rows by asynchronous copies, the rest by the tensor memory
accelerator) through a ring of stages; two partitions of four warps each multiply half of the rows.
Loading runs ahead into the next tile, so that it hides behind the epilogue, and a tile of half its
rows costs one partition's work.
"""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_flax.kernels.grouped_matmul.triton.activation import activate

ROWS: gl.constexpr = gl.constexpr(64)  # that one partition multiplies
COLUMNS: gl.constexpr = gl.constexpr(256)


@gluon.jit
def _find_tile(table_ptr, tile, tiles, GROUPS: gl.constexpr, CAPACITY: gl.constexpr,
               COLUMN_TILES: gl.constexpr, SPAN: gl.constexpr):  # fmt: skip
    """As product.py's `_tile_at`."""
    band = tile // (SPAN * COLUMN_TILES)
    height = gl.minimum(tiles - band * SPAN, SPAN)
    inside = tile - band * SPAN * COLUMN_TILES
    row_tile = band * SPAN + inside % height
    group = gl.load(table_ptr + 2 + GROUPS + row_tile)
    row = gl.load(table_ptr + 2 + GROUPS + CAPACITY + row_tile)
    return group, row, inside // height


@gluon.jit
def _produce(
    lhs, rhs, rows_ptr, table_ptr, a_rings, b_ring, ready, free,
    ROWS_TOTAL: gl.constexpr, K: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr,
    CAPACITY: gl.constexpr, MATRICES: gl.constexpr, INNER: gl.constexpr,
    TRANSPOSED: gl.constexpr, GATHER: gl.constexpr, PAIR: gl.constexpr,
    COLUMN_TILES: gl.constexpr, COLUMN_BLOCKS: gl.constexpr, SPAN: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BITS: gl.constexpr = rhs.dtype.primitive_bitwidth
    DEPTH: gl.constexpr = 1024 // BITS
    K_BLOCKS: gl.constexpr = (K + DEPTH - 1) // DEPTH
    BYTES: gl.constexpr = ((0 if GATHER else 2 * ROWS) + COLUMNS) * 128
    tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), tiles * COLUMN_TILES, PROGRAMS):
        group, row, column = _find_tile(
            table_ptr, tile, tiles, GROUPS, CAPACITY, COLUMN_TILES, SPAN
        )
        if group < GROUPS:
            branch = column // COLUMN_BLOCKS
            n = (column - branch * COLUMN_BLOCKS) * (COLUMNS // 2 if PAIR else COLUMNS)
            matrix = group * MATRICES + branch
            if GATHER:
                LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
                ms = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                ks = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
                first = gl.load(rows_ptr + gl.minimum(ms, ROWS_TOTAL - 1))
                second = gl.load(rows_ptr + gl.minimum(ms + ROWS, ROWS_TOTAL - 1))
                pointers = (
                    lhs + (first.to(gl.int64) * K)[:, None] + ks[None, :],
                    lhs + (second.to(gl.int64) * K)[:, None] + ks[None, :],
                )
            for block in range(INNER * K_BLOCKS):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(free.index(stage), phase ^ 1)
                full = ready.index(stage)
                mbarrier.expect(full, BYTES)
                k = block * DEPTH
                if GATHER:
                    for half in gl.static_range(2):
                        async_copy.async_copy_global_to_shared(
                            a_rings[half].index(stage), pointers[half] + k
                        )
                    async_copy.mbarrier_arrive(full, increment_count=False)
                else:
                    for half in gl.static_range(2):
                        place = [row + half * ROWS, k]
                        tma.async_load(lhs, place, full, a_rings[half].index(stage))
                chunks = b_ring.index(stage)
                if TRANSPOSED:
                    if PAIR:
                        for c in gl.static_range(4):
                            place = [(matrix * 2 + c % 2) * N + n + c // 2 * 64, k]
                            chunk = chunks.slice(c * 64, 64, 0)
                            tma.async_load(rhs, place, full, chunk)
                    elif INNER == 1:
                        place = [matrix * N + n, k]
                        tma.async_load(rhs, place, full, chunks)
                    else:
                        j = block // K_BLOCKS
                        place = [(matrix * INNER + j) * N + n, k - j * K]
                        tma.async_load(rhs, place, full, chunks)
                else:
                    quarters = chunks._reinterpret(
                        rhs.dtype, [4, DEPTH, 64], gl.NVMMASharedLayout(128, 16, 2)
                    )
                    for c in gl.static_range(4):
                        if PAIR:
                            place = [(matrix * 2 + c % 2) * K + k, n + c // 2 * 64]
                        else:
                            place = [matrix * K + k, n + c * 64]
                        tma.async_load(rhs, place, full, quarters.index(c))
                step += 1


@gluon.jit
def _quarters(acc):
    """[64, 256] -> four [64, 64], columns 0:64, 64:128, 128:192 and 192:256."""
    low, high = acc.reshape([ROWS, 2, 128]).permute(0, 2, 1).split()
    a, b = low.reshape([ROWS, 2, 64]).permute(0, 2, 1).split()
    c, d = high.reshape([ROWS, 2, 64]).permute(0, 2, 1).split()
    return a, b, c, d


@gluon.jit
def _store(values, out_ptr, pitch, row, end, n, buffer, N: gl.constexpr):
    """Writes [64, 64] to out[row:end, n:N] through shared memory, 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer.store(values.to(out_ptr.dtype.element_ty))
    gl.barrier()
    tile = buffer.load(WIDE)
    ms = row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    ns = n + gl.arange(0, 64, gl.SliceLayout(0, WIDE))
    pointers = out_ptr + (ms.to(gl.int64) * pitch)[:, None] + ns[None, :]
    gl.store(pointers, tile, mask=(ms < end)[:, None] & (ns < N)[None, :])
    gl.barrier()


@gluon.jit
def _operands(a_ring, b_ring, ready, step, STAGES: gl.constexpr,
              TRANSPOSED: gl.constexpr, GATHER: gl.constexpr):  # fmt: skip
    """Waits for a stage and returns this consumer's rows and the columns."""
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    if GATHER:
        fence_async_shared()
    a = a_ring.index(stage)
    b = b_ring.index(stage)
    if TRANSPOSED:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _consume(
    INDEX: gl.constexpr, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, table_ptr, out_ptr,
    a_ring, b_ring, buffers, ready, free,
    ROWS_TOTAL: gl.constexpr, K: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr,
    CAPACITY: gl.constexpr, BRANCHES: gl.constexpr, INNER: gl.constexpr,
    TRANSPOSED: gl.constexpr, GATHER: gl.constexpr, EPILOGUE: gl.constexpr,
    COLUMN_TILES: gl.constexpr, COLUMN_BLOCKS: gl.constexpr,
    SPAN: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, UP_OFFSET: gl.constexpr, LIMIT: gl.constexpr,
    BEFORE: gl.constexpr,
):  # fmt: skip
    PAIR: gl.constexpr = EPILOGUE == "activate" and BRANCHES == 2
    BITS: gl.constexpr = a_ring.dtype.primitive_bitwidth
    DEEP: gl.constexpr = 256 // BITS
    STEPS: gl.constexpr = INNER * ((K * BITS + 1023) // 1024)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, DEEP])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, DEEP])
    buffer = buffers.index(INDEX)
    tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), tiles * COLUMN_TILES, PROGRAMS):
        group, row, column = _find_tile(
            table_ptr, tile, tiles, GROUPS, CAPACITY, COLUMN_TILES, SPAN
        )
        branch = column // COLUMN_BLOCKS
        n = (column - branch * COLUMN_BLOCKS) * (COLUMNS // 2 if PAIR else COLUMNS)
        row += INDEX * ROWS
        if group < GROUPS:
            end = gl.load(table_ptr + 2 + group)
            if row < end:
                scale = rhs_scale_ptr
                if lhs_scale_ptr is not None:
                    ms = row + gl.arange(0, ROWS, gl.SliceLayout(1, PART))
                    row_scale = gl.load(lhs_scale_ptr + ms, mask=ms < end, other=0.0)[:, None]
                    scale = rhs_scale_ptr + (group * BRANCHES + branch) * N
                zeros = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
                a, b = _operands(a_ring, b_ring, ready, step, STAGES, TRANSPOSED, GATHER)
                acc = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                step += 1
                for _ in range(1, STEPS):
                    a, b = _operands(a_ring, b_ring, ready, step, STAGES, TRANSPOSED, GATHER)
                    acc = warpgroup_mma(a, b, acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=(acc,))  # the stage before is done with
                    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
                    step += 1
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
                q0, q1, q2, q3 = _quarters(acc)
                quarters = (q0, q1, q2, q3)
                bias = bias_ptr
                if bias_ptr is not None:
                    bias = bias_ptr + (group * BRANCHES + branch) * N
                if EPILOGUE == "activate":
                    WIDTH: gl.constexpr = BRANCHES
                    for c in gl.static_range(4 // WIDTH):
                        at = n + c * 64
                        first = gl.convert_layout(quarters[c * WIDTH], PART, assert_trivial=True)
                        up = gl.convert_layout(
                            quarters[c * WIDTH + WIDTH - 1], PART, assert_trivial=True
                        )
                        if lhs_scale_ptr is not None:
                            first *= row_scale * _columns(scale, at, N, PART)[None, :]
                            if PAIR:
                                up *= row_scale * _columns(scale + N, at, N, PART)[None, :]
                        if bias_ptr is not None:
                            first += _columns(bias, at, N, PART)[None, :]
                            if PAIR:
                                up += _columns(bias + N, at, N, PART)[None, :]
                        y = activate(first, up, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, PAIR)
                        _store(y, out_ptr, N, row, end, at, buffer, N)
                else:
                    for c in gl.static_range(4):
                        at = n + c * 64
                        y = gl.convert_layout(quarters[c], PART, assert_trivial=True)
                        if lhs_scale_ptr is not None:
                            y *= row_scale * _columns(scale, at, N, PART)[None, :]
                        if bias_ptr is not None:
                            y += _columns(bias, at, N, PART)[None, :]
                        _store(y, out_ptr + branch * N, BRANCHES * N, row, end, at, buffer, N)
            else:
                for _ in range(STEPS):
                    stage = step % STAGES
                    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    mbarrier.arrive(free.index(stage))
                    step += 1
        else:
            zeros = gl.zeros([ROWS, 64], gl.float32, PART)
            for c in gl.static_range(4):
                at = n + c * 64
                out = out_ptr + branch * N
                _store(zeros, out, BRANCHES * N, row, ROWS_TOTAL, at, buffer, N)


@gluon.jit
def _columns(ptr, n, N: gl.constexpr, LAYOUT: gl.constexpr):
    ns = n + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + ns, mask=ns < N, other=0.0).to(gl.float32)


@gluon.jit
def specialised_product_kernel(
    lhs, rhs, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, rows_ptr, table_ptr, out_ptr,
    ROWS_TOTAL: gl.constexpr, K: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr,
    CAPACITY: gl.constexpr, BRANCHES: gl.constexpr, INNER: gl.constexpr,
    TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, UP_OFFSET: gl.constexpr, LIMIT: gl.constexpr,
    BEFORE: gl.constexpr, SPAN: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As product.py's `product_kernel`; rhs is a descriptor of [G*J*K, N] or [G*J*N, K]."""
    GATHER: gl.constexpr = rows_ptr is not None
    PAIR: gl.constexpr = EPILOGUE == "activate" and BRANCHES == 2
    MATRICES: gl.constexpr = BRANCHES if EPILOGUE == "plain" else 1
    COLUMN_BLOCKS: gl.constexpr = (N + (COLUMNS // 2 if PAIR else COLUMNS) - 1) // (
        COLUMNS // 2 if PAIR else COLUMNS
    )
    COLUMN_TILES: gl.constexpr = COLUMN_BLOCKS * MATRICES
    KIND: gl.constexpr = rhs.dtype
    BITS: gl.constexpr = KIND.primitive_bitwidth
    DEPTH: gl.constexpr = 1024 // BITS
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    STAGED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a_rings = (
        gl.allocate_shared_memory(KIND, [STAGES, ROWS, DEPTH], SWIZZLED),
        gl.allocate_shared_memory(KIND, [STAGES, ROWS, DEPTH], SWIZZLED),
    )
    if TRANSPOSED:
        b_ring = gl.allocate_shared_memory(KIND, [STAGES, COLUMNS, DEPTH], SWIZZLED)
    else:
        b_ring = gl.allocate_shared_memory(KIND, [STAGES, DEPTH, COLUMNS], SWIZZLED)
    buffers = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2, ROWS, 64], STAGED)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129 if GATHER else 1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, table_ptr, out_ptr,
                a_rings[0], b_ring, buffers, ready, free,
                ROWS_TOTAL, K, N, GROUPS, CAPACITY, BRANCHES, INNER, TRANSPOSED, GATHER, EPILOGUE,
                COLUMN_TILES, COLUMN_BLOCKS, SPAN, PROGRAMS, STAGES,
                FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE,
            )),
            (_consume, (
                1, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, table_ptr, out_ptr,
                a_rings[1], b_ring, buffers, ready, free,
                ROWS_TOTAL, K, N, GROUPS, CAPACITY, BRANCHES, INNER, TRANSPOSED, GATHER, EPILOGUE,
                COLUMN_TILES, COLUMN_BLOCKS, SPAN, PROGRAMS, STAGES,
                FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE,
            )),
            (_produce, (
                lhs, rhs, rows_ptr, table_ptr, a_rings, b_ring, ready, free,
                ROWS_TOTAL, K, N, GROUPS, CAPACITY, MATRICES, INNER, TRANSPOSED, GATHER, PAIR,
                COLUMN_TILES, COLUMN_BLOCKS, SPAN, PROGRAMS, STAGES,
            )),
        ],
        [4, 4 if GATHER else 1],
        [216, 72] if GATHER else [232, 40],
    )  # fmt: skip

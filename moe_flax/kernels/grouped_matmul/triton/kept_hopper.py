"""The grouped product with matrices kept quantised, for Hopper and groups of few rows.

As kept.py's, with the way of a weight laid out by hand. Tiles of 128 bytes of K come by the tensor
memory accelerator into a ring of stages that runs on into the next output tile. A thread reads 16
bytes in a row, turns them into bfloat16 and feeds them to the tensor cores from its registers: they
are then not the K that the instruction wants there, but another one, and the rows on the other side
have their K in the order that makes up for it (`reorder`, and the `reordered` result of a first
product for a second). Several blocks share a multiprocessor: one unpacks while another multiplies.
"""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_flax.kernels.grouped_matmul.triton.activation import activate

WIDE: gl.constexpr = gl.constexpr(128)  # bytes of K a step


def depth(mxfp4: bool) -> int:
    """K of a step: 128 bytes of every matrix row."""
    return 256 if mxfp4 else 128


def reorder(rows: jax.Array, mxfp4: bool) -> jax.Array:
    """[R, K] -> [K / 64, R, 64] in the kernel's order of K, zeros up to a multiple of `depth`."""
    step = depth(mxfp4)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % step)))
    if mxfp4:  # lane, half of its bytes, word, half of a register, pair of registers, register
        parts = rows.reshape(rows.shape[0], -1, 4, 2, 4, 2, 2, 2).transpose(1, 6, 3, 0, 4, 7, 2, 5)
    else:
        parts = rows.reshape(rows.shape[0], -1, 4, 2, 4, 2, 2).transpose(1, 3, 0, 4, 5, 2, 6)
    return parts.reshape(-1, rows.shape[0], 64)


@gluon.jit
def _reordered(n, MXFP4: gl.constexpr):
    """The place that `reorder` gives to column n."""
    if MXFP4:
        inside = (n & 2) << 6 | (n & 32) << 1 | (n & 24) << 1 | (n & 1) << 3 | (n >> 6 & 3) << 1
        return (n & ~255) | inside | (n >> 2 & 1)
    else:
        inside = (n & 16) << 2 | (n & 12) << 2 | (n & 2) << 2 | (n >> 5 & 3) << 1
        return (n & ~127) | inside | (n & 1)


@gluon.constexpr_function
def _bytes_layout(columns, warps):
    """[columns, 128]: 16 bytes in a row a thread, then 16 more, rows as the tensor core's."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 16]]
    rows = 16 * warps
    while rows < columns:
        registers.append([rows, 0])
        rows *= 2
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    bases = [[16, 0], [32, 0], [64, 0], [128, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, bases[: warps.bit_length() - 1], [], [columns, 128]
    )


@gluon.constexpr_function
def _windows_layout(columns, warps):
    """The same with the bytes as [8, 16]: of 16 that share a scale."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0], [0, 1, 0]]
    rows = 16 * warps
    while rows < columns:
        registers.append([rows, 0, 0])
        rows *= 2
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    bases = [[16, 0, 0], [32, 0, 0], [64, 0, 0], [128, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, bases[: warps.bit_length() - 1], [], [columns, 8, 16]
    )


@gluon.jit
def _int8(packed):
    """int8 -> bfloat16, 4 at a time: 128 and the low 7 bits, less 128, or 256 of a negative one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, one, high, less;
        mov.b32 one, 0x3F803F80;
        mov.b32 high, 0x43004300;
        mov.b32 less, 0xC300C300;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        lop3.b32 c, a, 0x00800080, less, 0xEA;
        lop3.b32 d, b, 0x00800080, less, 0xEA;
        lop3.b32 a, a, 0x007F007F, high, 0xEA;
        lop3.b32 b, b, 0x007F007F, high, 0xEA;
        fma.rn.bf16x2 $0, a, one, c;
        fma.rn.bf16x2 $1, b, one, d;
        }""",
        "=r,=r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _mxfp4(packed, scale):
    """4 bytes with 8 e2m1 -> 4 and 4 bfloat16, times the scale's 2 bfloat16 in 32 bits.

    Each e2m1's exponent and mantissa become the lowest of a bfloat16's exponent and the highest of
    its mantissa: 2^-126 times the number, which the scale makes up for. A register holds nibbles
    c and c + 4, for c from 0 to 3.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s, t, u;
        shl.b32 t, $4, 12;
        shl.b32 u, $4, 6;
        and.b32 u, u, 0x01C001C0;
        lop3.b32 t, t, 0x80008000, u, 0xEA;
        mul.bf16x2 $0, t, $5;
        shl.b32 t, $4, 8;
        shl.b32 u, $4, 2;
        and.b32 u, u, 0x01C001C0;
        lop3.b32 t, t, 0x80008000, u, 0xEA;
        mul.bf16x2 $1, t, $5;
        shl.b32 t, $4, 4;
        shr.b32 u, $4, 2;
        and.b32 u, u, 0x01C001C0;
        lop3.b32 t, t, 0x80008000, u, 0xEA;
        mul.bf16x2 $2, t, $5;
        shr.b32 u, $4, 6;
        and.b32 u, u, 0x01C001C0;
        lop3.b32 t, $4, 0x80008000, u, 0xEA;
        mul.bf16x2 $3, t, $5;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r", [packed, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _windows(scale_ptr, row, n, step, K: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """The scales of [BLOCK_N, 256 of K], two bfloat16 each, as `_mxfp4` wants them.

    2^126 makes up for what it makes of the values, less 2^63 that the sums are multiplied with: a
    scale of 2^127 would not fit.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _windows_layout(BLOCK_N, gl.num_warps()))
    ns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    windows = step * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    at = (row + ns).to(gl.int64)[:, None] * (K // 32) + windows[None, :]
    inside = (ns < N)[:, None] & (windows < K // 32)[None, :]
    scale = gl.load(scale_ptr + at, mask=inside, other=0)
    if scale_ptr.dtype.element_ty == gl.uint8:
        wide = scale.to(gl.uint32)
        bits = gl.where(wide == 255, 0x7FC0, gl.minimum(wide + 63, 254) << 7)
    else:
        bits = (scale * 2.0**63).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    return bits | bits << 16


@gluon.jit
def _ordered(w, BLOCK_N: gl.constexpr, ACC: gl.constexpr):
    """[BLOCK_N, 128] in the bytes' order -> two [BLOCK_N, 64] in `reorder`'s; moves nothing."""
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    w = w.reshape([BLOCK_N, 4, 2, 4, 2, 2]).permute(0, 3, 4, 1, 5, 2)
    first, second = w.reshape([BLOCK_N, 64, 2]).split()
    return gl.convert_layout(first, A), gl.convert_layout(second, A)


@gluon.jit
def _multiply(
    acc, packed, scale, xs, use_acc: gl.constexpr, SCALES: gl.constexpr,
    BLOCK_N: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Unpacks [BLOCK_N, 128] bytes; starts acc + them @ the rows' slices of 64."""
    if SCALES == "mxfp4":
        wide = scale[:, :, None].broadcast_to([BLOCK_N, 8, 16])
        wide = gl.convert_layout(wide.reshape([BLOCK_N, 128]), packed.type.layout)
        low, high = _mxfp4(packed, wide)
        parts = _ordered(low, BLOCK_N, ACC) + _ordered(high, BLOCK_N, ACC)
    elif packed.dtype == gl.int8:
        parts = _ordered(_int8(packed), BLOCK_N, ACC)
    else:  # exact, and quicker than by float16
        parts = _ordered(packed.to(gl.float32).to(gl.bfloat16), BLOCK_N, ACC)
    for i in gl.static_range(len(parts)):
        x = xs.index(i).permute((1, 0))
        acc = warpgroup_mma(parts[i], x, acc, use_acc=use_acc or i > 0, is_async=True)
    return acc


@gluon.jit
def _find(table_ptr, tile, total, tiles, GROUPS: gl.constexpr, CAPACITY: gl.constexpr,
          COLUMN_TILES: gl.constexpr, COLUMN_BLOCKS: gl.constexpr, BRANCHES: gl.constexpr,
          SPAN: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """Tile number -> (group, matrix, first row, first column)."""
    tile = gl.minimum(tile, gl.maximum(total - 1, 0))
    band = tile // (SPAN * COLUMN_TILES)
    height = gl.maximum(gl.minimum(tiles - band * SPAN, SPAN), 1)
    inside = tile - band * SPAN * COLUMN_TILES
    row_tile = band * SPAN + inside % height
    group = gl.load(table_ptr + 2 + GROUPS + row_tile)
    row = gl.load(table_ptr + 2 + GROUPS + CAPACITY + row_tile)
    column = inside // height
    branch = column // COLUMN_BLOCKS
    return group, group * BRANCHES + branch, row, (column - branch * COLUMN_BLOCKS) * BLOCK_N


@gluon.jit
def _advance(
    table_ptr, tile, k, matrix, row, n, total, tiles,
    GROUPS: gl.constexpr, CAPACITY: gl.constexpr, COLUMN_TILES: gl.constexpr,
    COLUMN_BLOCKS: gl.constexpr, BRANCHES: gl.constexpr, SPAN: gl.constexpr,
    BLOCK_N: gl.constexpr, STEPS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """What is to be loaded next: the next step of K, or the first one of the next tile."""
    k += 1
    if k == STEPS:
        k = 0
        tile += PROGRAMS
        _, matrix, row, n = _find(
            table_ptr, tile, total, tiles, GROUPS, CAPACITY, COLUMN_TILES, COLUMN_BLOCKS,
            BRANCHES, SPAN, BLOCK_N,
        )  # fmt: skip
    return tile, k, matrix, row, n


@gluon.jit
def _load(
    lhs, rhs, w_ring, x_ring, ready, stage, pred, matrix, row, n, k,
    SLICES: gl.constexpr, STAGE_BYTES: gl.constexpr,
):  # fmt: skip
    """Starts a stage's loads, as few as can be: the compiler has the block wait at every one."""
    full = ready.index(stage)
    mbarrier.expect(full, STAGE_BYTES, pred)
    tma.async_load(rhs, [matrix, n, k * WIDE], full, w_ring.index(stage), pred)
    tma.async_load(lhs, [k * SLICES, row, 0], full, x_ring.index(stage), pred)


@gluon.jit
def kept_hopper_kernel(
    lhs, rhs, scale_ptr, bias_ptr, table_ptr, out_ptr,
    ROWS: gl.constexpr, K: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr,
    CAPACITY: gl.constexpr, BRANCHES: gl.constexpr, EPILOGUE: gl.constexpr, SCALES: gl.constexpr,
    REORDERED: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr,
    UP_OFFSET: gl.constexpr, LIMIT: gl.constexpr, BEFORE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPAN: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """lhs: descriptor of sorted rows after `reorder`, as [K / 64, ROWS, 64]; rhs: of
    [G * BRANCHES, N, bytes], with both branches in a tile where the activation is fused.

    SCALES as kept.py's. The result has WIDTH columns, those from N on zero; REORDERED, "" or "8" or
    "4", puts them as `reorder` does for a product with matrices of so many bits.
    """
    PAIR: gl.constexpr = EPILOGUE == "activate" and BRANCHES == 2
    MATRICES: gl.constexpr = 2 if PAIR else 1
    DEEP: gl.constexpr = 256 if SCALES == "mxfp4" else 128
    SLICES: gl.constexpr = DEEP // 64
    STEPS: gl.constexpr = (K + DEEP - 1) // DEEP
    COLUMN_BLOCKS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    COLUMN_TILES: gl.constexpr = COLUMN_BLOCKS * (1 if EPILOGUE == "activate" else BRANCHES)
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    BYTES: gl.constexpr = _bytes_layout(BLOCK_N, WARPS)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    STAGE_BYTES: gl.constexpr = MATRICES * BLOCK_N * WIDE + BLOCK_M * DEEP * 2

    w_shape: gl.constexpr = [STAGES, MATRICES, BLOCK_N, WIDE]
    x_shape: gl.constexpr = [STAGES, SLICES, BLOCK_M, 64]
    w_ring = gl.allocate_shared_memory(rhs.dtype, w_shape, rhs.layout)
    x_ring = gl.allocate_shared_memory(lhs.dtype, x_shape, lhs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    tiles = gl.load(table_ptr)
    total = tiles * COLUMN_TILES
    tile_ahead = gl.program_id(0)
    k_ahead = 0
    _, matrix_ahead, row_ahead, n_ahead = _find(
        table_ptr, tile_ahead, total, tiles, GROUPS, CAPACITY, COLUMN_TILES, COLUMN_BLOCKS,
        BRANCHES, SPAN, BLOCK_N,
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        _load(
            lhs, rhs, w_ring, x_ring, ready, i, tile_ahead < total, matrix_ahead, row_ahead,
            n_ahead, k_ahead, SLICES, STAGE_BYTES,
        )  # fmt: skip
        tile_ahead, k_ahead, matrix_ahead, row_ahead, n_ahead = _advance(
            table_ptr, tile_ahead, k_ahead, matrix_ahead, row_ahead, n_ahead, total, tiles,
            GROUPS, CAPACITY, COLUMN_TILES, COLUMN_BLOCKS, BRANCHES, SPAN, BLOCK_N, STEPS, PROGRAMS,
        )  # fmt: skip

    count = 0
    for tile in range(gl.program_id(0), total, PROGRAMS):
        group, matrix, row, n = _find(
            table_ptr, tile, total, tiles, GROUPS, CAPACITY, COLUMN_TILES, COLUMN_BLOCKS,
            BRANCHES, SPAN, BLOCK_N,
        )  # fmt: skip
        zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
        acc = zeros
        acc2 = zeros
        if SCALES == "mxfp4":
            next1 = _windows(scale_ptr, matrix * N, n, 0, K, N, BLOCK_N)
            next2 = next1
            if PAIR:
                next2 = _windows(scale_ptr, matrix * N + N, n, 0, K, N, BLOCK_N)
        else:
            next1 = 0
            next2 = 0
        for k in range(STEPS):
            scale1 = next1
            scale2 = next2
            if SCALES == "mxfp4":  # of the next step: they come by no ring
                next1 = _windows(scale_ptr, matrix * N, n, k + 1, K, N, BLOCK_N)
                if PAIR:
                    next2 = _windows(scale_ptr, matrix * N + N, n, k + 1, K, N, BLOCK_N)
            elif SCALES == "block":
                BLOCKS: gl.constexpr = (N + 127) // 128
                block = matrix * BLOCKS + gl.minimum(n // 128, BLOCKS - 1)
                scale1 = gl.load(scale_ptr + block * STEPS + k)
                if PAIR:
                    scale2 = gl.load(scale_ptr + (block + BLOCKS) * STEPS + k)
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
            xs = x_ring.index(stage)._reinterpret(lhs.dtype, [SLICES, BLOCK_M, 64], HALVES)
            ws = w_ring.index(stage)._reinterpret(rhs.dtype, [MATRICES, BLOCK_N, WIDE], WHOLE)
            packed = ws.index(0).load(BYTES)
            if SCALES == "block":
                part = _multiply(zeros, packed, scale1, xs, False, SCALES, BLOCK_N, ACC)
            else:
                acc = _multiply(acc, packed, scale1, xs, True, SCALES, BLOCK_N, ACC)
            if PAIR:
                packed = ws.index(1).load(BYTES)
                if SCALES == "block":
                    part2 = _multiply(zeros, packed, scale2, xs, False, SCALES, BLOCK_N, ACC)
                    part, part2 = warpgroup_mma_wait(0, deps=(part, part2))
                    acc += part * scale1
                    acc2 += part2 * scale2
                else:
                    acc2 = _multiply(acc2, packed, scale2, xs, True, SCALES, BLOCK_N, ACC)
                    acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
            elif SCALES == "block":
                part = warpgroup_mma_wait(0, deps=(part,))
                acc += part * scale1
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.barrier()
            _load(
                lhs, rhs, w_ring, x_ring, ready, stage, tile_ahead < total, matrix_ahead,
                row_ahead, n_ahead, k_ahead, SLICES, STAGE_BYTES,
            )  # fmt: skip
            tile_ahead, k_ahead, matrix_ahead, row_ahead, n_ahead = _advance(
                table_ptr, tile_ahead, k_ahead, matrix_ahead, row_ahead, n_ahead, total, tiles,
                GROUPS, CAPACITY, COLUMN_TILES, COLUMN_BLOCKS, BRANCHES, SPAN, BLOCK_N, STEPS,
                PROGRAMS,
            )  # fmt: skip
            count += 1

        ns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
        inside = ns < N
        if SCALES == "mxfp4":
            acc *= 2.0**63
            acc2 *= 2.0**63
        elif SCALES == "channel":
            at = scale_ptr + matrix.to(gl.int64) * N + ns
            acc *= gl.load(at, mask=inside, other=0.0)[:, None]
            if PAIR:
                acc2 *= gl.load(at + N, mask=inside, other=0.0)[:, None]
        if bias_ptr is not None:
            at = bias_ptr + matrix.to(gl.int64) * N + ns
            acc += gl.load(at, mask=inside, other=0.0).to(gl.float32)[:, None]
            if PAIR:
                acc2 += gl.load(at + N, mask=inside, other=0.0).to(gl.float32)[:, None]
        y = acc
        if EPILOGUE == "activate":
            y = activate(acc, acc2, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, PAIR)
        if WIDTH > N:
            y = gl.where(inside[:, None], y, 0.0)
        y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), OUT)
        end = gl.load(table_ptr + 2 + group)
        ms = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        ns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
        if REORDERED == "":
            pitch: gl.constexpr = N if EPILOGUE == "activate" else BRANCHES * N
            places = ((matrix - group * BRANCHES) * N + ns).to(gl.int64)
        else:
            pitch: gl.constexpr = 64
            places = _reordered(ns, REORDERED == "4")
            places = (places // 64).to(gl.int64) * (ROWS * 64) + places % 64
        out = out_ptr + ms.to(gl.int64)[None, :] * pitch + places[:, None]
        gl.store(out, y, mask=(ms < end)[None, :] & (ns < WIDTH)[:, None])

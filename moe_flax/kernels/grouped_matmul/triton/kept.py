"""The grouped product with matrices kept quantised, for groups of few rows.

Such products wait for the matrices' bytes, so the stored bytes are what is read, and they become
bfloat16 in registers. Tensor cores take only their first operand from registers: the product is
computed transposed, matrices first, [columns, K] x [K, rows], and the matrices are stored with K
last. Otherwise as product.py: a persistent grid, tiles from the plan, both branches in one tile
where the activation is fused.
"""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import triton
import triton.language as tl

from moe_flax.kernels.grouped_matmul.triton.activation import activate
from moe_flax.kernels.grouped_matmul.triton.product import _tile_at


@triton.jit
def _scales(scale_ptr, matrix, n, k, K: tl.constexpr, N: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The scales of a tile's windows of 32, [BLOCK_N, BLOCK_K / 32], as bits of bfloat16."""
    ns = n + tl.arange(0, BLOCK_N)
    windows = k // 32 + tl.arange(0, BLOCK_K // 32)
    at = (tl.cast(matrix, tl.int64) * N + ns)[:, None] * (K // 32) + windows[None, :]
    inside = (ns < N)[:, None] & (windows < K // 32)[None, :]
    scale = tl.load(scale_ptr + at, mask=inside, other=0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = scale.to(tl.uint32)
        return tl.where(scale == 255, 0x7FC0, tl.where(scale == 0, 0x40, scale << 7))
    else:
        return scale.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _times(x, y):
    """Multiplies two bfloat16 in each 32 bits."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, tl.full([1, 1], 0x80008000, tl.uint32)],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _unpack_mxfp4(packed, scale, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes of two e2m1, the low one first, and the scale of each 32 -> bfloat16, exactly."""
    byte = packed.to(tl.uint32)
    # Each e2m1's exponent and mantissa become the lowest of a bfloat16's exponent and the highest
    # of its mantissa: 2^-126 times the number.
    pair = ((byte * 0x40040) & 0x01C001C0) | ((byte * 0x1001000) & 0x80008000)
    scale = (scale | (scale << 16)).expand_dims(2)
    scale = scale.broadcast_to(BLOCK_N, BLOCK_K // 32, 16).reshape([BLOCK_N, BLOCK_K // 2])
    pair = _times(_times(pair, tl.full([1, 1], 0x7E807E80, tl.uint32)), scale)
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape([BLOCK_N, BLOCK_K])


@triton.jit
def _float8(bits):
    """Bits of float8_e4m3fn -> float32, for chips that do not know it."""
    wide = bits.to(tl.uint32)
    size = wide & 0x7F
    value = ((size << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(size == 0x7F, float("nan"), value)


@triton.jit
def _multiply(
    acc, rhs, scale_ptr, windows, x, matrix, n, k,
    K: tl.constexpr, N: tl.constexpr, SCALES: tl.constexpr, DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] + matrix[n:, k:] @ x, the scales of K's windows applied."""
    ns = n + tl.arange(0, BLOCK_N)
    PACKED: tl.constexpr = 2 if SCALES == "mxfp4" else 1
    if DESCRIPTOR:
        w = rhs.load([matrix, n, k // PACKED]).reshape([BLOCK_N, BLOCK_K // PACKED])
    else:
        ks = k // PACKED + tl.arange(0, BLOCK_K // PACKED)
        base = rhs + tl.cast(matrix, tl.int64) * (N * (K // PACKED))
        inside = (ns < N)[:, None] & (ks < K // PACKED)[None, :]
        w = tl.load(base + ns[:, None] * (K // PACKED) + ks[None, :], mask=inside, other=0.0)
    if SCALES == "mxfp4":
        acc += tl.dot(_unpack_mxfp4(w, windows, BLOCK_N, BLOCK_K), x)
    else:
        w = _float8(w) if w.dtype == tl.uint8 else w.to(tl.float32)
        w = w.to(x.dtype)  # exact, and quicker than by float16
        if SCALES == "block":
            at = matrix * ((N + 127) // 128) + n // 128
            scale = tl.load(scale_ptr + at * ((K + 127) // 128) + k // 128)
            acc += tl.dot(w, x) * scale
        else:
            acc += tl.dot(w, x)
    return acc


@triton.jit
def kept_product_kernel(
    lhs, rhs, scale_ptr, bias_ptr, rows_ptr, table_ptr, out_ptr,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, BRANCHES: tl.constexpr, EPILOGUE: tl.constexpr, SCALES: tl.constexpr,
    DESCRIPTOR: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr, BEFORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """lhs [ROWS or T, K]; rhs [G * BRANCHES, N, K], "mxfp4": [G * BRANCHES, N, K / 2] in pairs.

    SCALES: "channel" [G * BRANCHES, N], "block" [G * BRANCHES, ceil(N / 128), ceil(K / 128)] with
    BLOCK_K = 128, "mxfp4" [G * BRANCHES, N, K / 32], bytes of exponents or floats. The result is as
    product.py's.
    """
    FUSED: tl.constexpr = EPILOGUE == "activate"
    PAIR: tl.constexpr = FUSED and BRANCHES == 2
    tiles = tl.load(table_ptr)
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    column_tiles: tl.constexpr = column_blocks * (1 if FUSED else BRANCHES)
    k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for tile in range(tl.program_id(0), tiles * column_tiles, PROGRAMS):
        group, row, end, column = _tile_at(
            table_ptr, tile, tiles, GROUPS, CAPACITY, ROWS, column_tiles, SPAN
        )
        branch = column // column_blocks
        n = (column - branch * column_blocks) * BLOCK_N
        ms = row + tl.arange(0, BLOCK_M)
        ns = n + tl.arange(0, BLOCK_N)
        live = ms < end
        sources = ms
        if rows_ptr is not None:
            sources = tl.load(rows_ptr + ms, mask=live, other=0)
        lhs_rows = lhs + sources[:, None].to(tl.int64) * K
        matrix = group * BRANCHES + branch
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc2 = acc
        first = 0
        up = 0
        if SCALES == "mxfp4":
            first = _scales(scale_ptr, matrix, n, 0, K, N, BLOCK_N, BLOCK_K)
            if PAIR:
                up = _scales(scale_ptr, matrix + 1, n, 0, K, N, BLOCK_N, BLOCK_K)
        for step in range(tl.where(group < GROUPS, k_blocks, 0)):
            k = step * BLOCK_K
            now = first
            now2 = up
            if SCALES == "mxfp4":  # of the next step
                first = _scales(scale_ptr, matrix, n, k + BLOCK_K, K, N, BLOCK_N, BLOCK_K)
                if PAIR:
                    up = _scales(scale_ptr, matrix + 1, n, k + BLOCK_K, K, N, BLOCK_N, BLOCK_K)
            ks = k + tl.arange(0, BLOCK_K)
            x = tl.load(lhs_rows + ks[None, :], mask=live[:, None] & (ks < K)[None, :], other=0.0).T
            acc = _multiply(
                acc, rhs, scale_ptr, now, x, matrix, n, k, K, N, SCALES, DESCRIPTOR, BLOCK_N,
                BLOCK_K,
            )  # fmt: skip
            if PAIR:
                acc2 = _multiply(
                    acc2, rhs, scale_ptr, now2, x, matrix + 1, n, k, K, N, SCALES, DESCRIPTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
        columns = (ns < N) & (group < GROUPS)
        if SCALES == "channel":
            scale = scale_ptr + tl.cast(matrix, tl.int64) * N + ns
            acc = acc * tl.load(scale, mask=columns, other=0.0)[:, None]
            if PAIR:
                acc2 = acc2 * tl.load(scale + N, mask=columns, other=0.0)[:, None]
        if bias_ptr is not None:
            bias = bias_ptr + matrix * N + ns
            acc += tl.load(bias, mask=columns, other=0.0).to(tl.float32)[:, None]
            if PAIR:
                acc2 += tl.load(bias + N, mask=columns, other=0.0).to(tl.float32)[:, None]
        y = acc
        if FUSED:
            y = activate(acc, acc2, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, PAIR)
        y = y.to(out_ptr.dtype.element_ty).T
        wide = ms.to(tl.int64)[:, None] * (N if FUSED else BRANCHES * N)
        out = out_ptr + wide + branch * N + ns[None, :]
        tl.store(out, y, mask=live[:, None] & (ns < N)[None, :])

"""The grouped product over sorted rows: one persistent kernel, with what is fused before and after.

A program walks over output tiles; the plan (sorting.py) tells each tile's group and first row, so
the grid never depends on how the rows are spread. Rows can be gathered on the way in (`rows`), the
group's matrix is read as [K, N] or in place as its transpose, and the epilogue is "plain" (plus
bias) or "activate": both branches in one tile, through the activation.
"""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import triton
import triton.language as tl

from moe_flax.kernels.grouped_matmul.triton.activation import activate


@triton.jit
def _tile_at(table_ptr, tile, tiles, GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
             ROWS: tl.constexpr, COLUMN_TILES: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Tile number -> (group, first row, end row, column tile); SPAN row tiles share columns.

    Group GROUPS holds the rows past the last group.
    """
    band = tile // (SPAN * COLUMN_TILES)
    height = tl.minimum(tiles - band * SPAN, SPAN)
    inside = tile - band * SPAN * COLUMN_TILES
    row_tile = band * SPAN + inside % height
    group = tl.load(table_ptr + 2 + GROUPS + row_tile)
    row = tl.load(table_ptr + 2 + GROUPS + CAPACITY + row_tile)
    end = tl.load(table_ptr + 2 + group, mask=group < GROUPS, other=ROWS)
    return group, row, end, inside // height


@triton.jit
def _rhs_tile(rhs, matrix, k, n, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
              DESCRIPTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Loads [BLOCK_K, BLOCK_N] of a group's matrix, stored [K, N] or, transposed, [N, K]."""
    if DESCRIPTOR:
        if TRANSPOSED:
            tile = rhs.load([matrix, n, k]).reshape([BLOCK_N, BLOCK_K]).T
        else:
            tile = rhs.load([matrix, k, n]).reshape([BLOCK_K, BLOCK_N])
    else:
        base = rhs + tl.cast(matrix, tl.int64) * (K * N)
        ks = k + tl.arange(0, BLOCK_K)
        ns = n + tl.arange(0, BLOCK_N)
        if TRANSPOSED:
            offsets = ns[None, :].to(tl.int64) * K + ks[:, None]
        else:
            offsets = ks[:, None].to(tl.int64) * N + ns[None, :]
        mask = (ks[:, None] < K) & (ns[None, :] < N)
        tile = tl.load(base + offsets, mask=mask, other=0.0)
    return tile


@triton.jit
def _halves(acc):
    """[rows, columns] -> the first and the last half of the columns."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()


@triton.jit
def _write(
    acc, acc2, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, out_ptr, ms, ns, live, group, branch,
    N: tl.constexpr, GROUPS: tl.constexpr, BRANCHES: tl.constexpr, EPILOGUE: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and store of a tile's sums: rows ms, columns ns of a branch."""
    FUSED: tl.constexpr = EPILOGUE == "activate"
    PAIR: tl.constexpr = FUSED and BRANCHES == 2
    mask = live[:, None] & (ns < N)[None, :]
    wide = ms.to(tl.int64)[:, None]
    if lhs_scale_ptr is not None:
        scaled = live & (group < GROUPS)
        row_scale = tl.load(lhs_scale_ptr + ms, mask=scaled, other=0.0)[:, None]
        columns = rhs_scale_ptr + (group * BRANCHES + branch) * N + ns
        inside = (ns < N) & (group < GROUPS)
        acc = acc * row_scale * tl.load(columns, mask=inside, other=0.0)[None, :]
        if PAIR:
            acc2 = acc2 * row_scale * tl.load(columns + N, mask=inside, other=0.0)[None, :]
    if bias_ptr is not None:
        base = bias_ptr + (group * BRANCHES + branch) * N
        acc += tl.load(base + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
        if PAIR:
            acc2 += tl.load(base + N + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    if FUSED:
        y = activate(acc, acc2, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE, PAIR)
        tl.store(out_ptr + wide * N + ns[None, :], y.to(out_ptr.dtype.element_ty), mask)
    else:
        out = out_ptr + wide * (BRANCHES * N) + branch * N + ns[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def product_kernel(
    lhs, rhs, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, rows_ptr, table_ptr, out_ptr,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, BRANCHES: tl.constexpr, INNER: tl.constexpr, TRANSPOSED: tl.constexpr,
    LHS_DESCRIPTOR: tl.constexpr, RHS_DESCRIPTOR: tl.constexpr, EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr,
    LIMIT: tl.constexpr, BEFORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    PROGRAMS: tl.constexpr, SHORT_SUMS: tl.constexpr,
):  # fmt: skip
    """See the module. BRANCHES: of the output (rhs [G, BRANCHES, ...]); INNER: branches contracted.

    lhs [ROWS or T, INNER, K]; out [ROWS, BRANCHES, N] ("plain") or [ROWS, N] ("activate"). Rows
    past the last group become zero where the plan has tiles for them. Products of 8-bit operands
    are multiplied with lhs_scale [ROWS] and rhs_scale [G, BRANCHES, N]; Hopper's tensor cores add
    SHORT_SUMS of their terms in fewer bits than float32 (None: all of them).
    """
    FUSED: tl.constexpr = EPILOGUE == "activate"
    PAIR: tl.constexpr = FUSED and BRANCHES == 2
    tiles = tl.load(table_ptr)
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    column_tiles: tl.constexpr = column_blocks * (BRANCHES if EPILOGUE == "plain" else 1)
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
        if not LHS_DESCRIPTOR:
            sources = ms
            if rows_ptr is not None:
                sources = tl.load(rows_ptr + ms, mask=live, other=0)
            lhs_rows = lhs + sources[:, None].to(tl.int64) * (INNER * K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc2 = acc
        steps = tl.where(group < GROUPS, INNER * k_blocks, 0)
        for step in range(steps):
            if INNER == 1:
                j = 0
                k = step * BLOCK_K
            else:
                j = step // k_blocks
                k = (step - j * k_blocks) * BLOCK_K
            if LHS_DESCRIPTOR:
                if INNER == 1:
                    a = lhs.load([row, k])
                else:
                    a = lhs.load([row, j, k]).reshape([BLOCK_M, BLOCK_K])
            else:
                ks = k + tl.arange(0, BLOCK_K)
                mask = live[:, None]
                if K % BLOCK_K != 0:
                    mask = mask & (ks[None, :] < K)
                a = tl.load(lhs_rows + j * K + ks[None, :], mask=mask, other=0.0)
            if PAIR:
                matrix = group * 2
            elif INNER == 1:
                matrix = group * (BRANCHES if EPILOGUE == "plain" else 1) + branch
            else:
                matrix = group * INNER + j
            b = _rhs_tile(rhs, matrix, k, n, K, N, TRANSPOSED, RHS_DESCRIPTOR, BLOCK_N, BLOCK_K)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=SHORT_SUMS)
            if PAIR:
                b2 = _rhs_tile(
                    rhs, matrix + 1, k, n, K, N, TRANSPOSED, RHS_DESCRIPTOR, BLOCK_N, BLOCK_K
                )
                acc2 = tl.dot(
                    a, b2, acc2, input_precision=PRECISION, max_num_imprecise_acc=SHORT_SUMS
                )
        if lhs_scale_ptr is None:
            _write(
                acc, acc2, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, out_ptr, ms, ns, live, group,
                branch, N, GROUPS, BRANCHES, EPILOGUE, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE,
            )  # fmt: skip
        else:  # by halves: rows, columns, scales and bias do not fit into the registers at once
            low, high = _halves(acc)
            low2, high2 = low, high
            if PAIR:
                low2, high2 = _halves(acc2)
            half = n + tl.arange(0, BLOCK_N // 2)
            _write(
                low, low2, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, out_ptr, ms, half, live, group,
                branch, N, GROUPS, BRANCHES, EPILOGUE, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE,
            )  # fmt: skip
            half += BLOCK_N // 2
            _write(
                high, high2, lhs_scale_ptr, rhs_scale_ptr, bias_ptr, out_ptr, ms, half, live, group,
                branch, N, GROUPS, BRANCHES, EPILOGUE, FUNCTION, ALPHA, UP_OFFSET, LIMIT, BEFORE,
            )  # fmt: skip

"""The product over each group's rows, lhs^T @ grad: the gradient by the groups' matrices."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def contraction_kernel(
    lhs_ptr, grad_ptr, lhs_tiles, grad_tiles, table_ptr, out_ptr,
    K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, LHS_BRANCHES: tl.constexpr,
    GRAD_BRANCHES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """lhs [R, K], grad [R, N] -> out [G, K, N]; BLOCK_M rows a step.

    Either side may have branches ahead of its last axis, and then out has them. With tile
    descriptors full steps go by them, and only a group's last rows by masked loads. A group without
    rows has no step and writes its zeros.
    """
    BRANCHES: tl.constexpr = LHS_BRANCHES * GRAD_BRANCHES
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    columns: tl.constexpr = column_blocks * BRANCHES
    heights: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for tile in range(tl.program_id(0), GROUPS * heights * columns, PROGRAMS):
        group = tile // (heights * columns)
        inside = tile - group * heights * columns
        band = inside // (SPAN * columns)
        height = tl.minimum(heights - band * SPAN, SPAN)
        inside -= band * SPAN * columns
        k = (band * SPAN + inside % height) * BLOCK_K
        column = inside // height
        branch = column // column_blocks
        n = (column - branch * column_blocks) * BLOCK_N
        ks = k + tl.arange(0, BLOCK_K)
        ns = n + tl.arange(0, BLOCK_N)
        lhs_branch = branch if LHS_BRANCHES > 1 else 0
        grad_branch = branch if GRAD_BRANCHES > 1 else 0
        begin = tl.load(table_ptr + 1 + group)
        end = tl.load(table_ptr + 2 + group)
        acc = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        masked = begin
        if lhs_tiles is not None:
            masked = begin + (end - begin) // BLOCK_M * BLOCK_M
            for row in range(begin, masked, BLOCK_M):
                a = lhs_tiles.load([row, lhs_branch * K + k])
                b = grad_tiles.load([row, grad_branch * N + n])
                acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        for row in range(masked, end, BLOCK_M):
            ms = row + tl.arange(0, BLOCK_M)
            live = ms < end
            lhs_rows = ms.to(tl.int64) * LHS_BRANCHES + lhs_branch
            grad_rows = ms.to(tl.int64) * GRAD_BRANCHES + grad_branch
            a = tl.load(
                lhs_ptr + lhs_rows[:, None] * K + ks[None, :],
                mask=live[:, None] & (ks < K)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                grad_ptr + grad_rows[:, None] * N + ns[None, :],
                mask=live[:, None] & (ns < N)[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        base = out_ptr + (group.to(tl.int64) * BRANCHES + branch) * (K * N)
        out = base + ks[:, None].to(tl.int64) * N + ns[None, :]
        mask = (ks < K)[:, None] & (ns < N)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_sum_kernel(
    values_ptr, scale_ptr, table_ptr, out_ptr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums each group's rows of values [R, N], times scale [R] where given, to out [G, N]."""
    group = tl.program_id(0)
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(table_ptr + 1 + group)
    end = tl.load(table_ptr + 2 + group)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in range(begin, end, BLOCK_M):
        ms = row + tl.arange(0, BLOCK_M)
        live = ms < end
        x = tl.load(
            values_ptr + ms.to(tl.int64)[:, None] * N + ns[None, :],
            mask=live[:, None] & (ns < N)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if scale_ptr is not None:
            x = x * tl.load(scale_ptr + ms, mask=live, other=0.0)[:, None]
        acc += x
    total = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * N + ns, total, mask=ns < N)

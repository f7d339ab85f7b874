"""Which tile sizes a product runs with: a measured table, and a heuristic for what it lacks."""

import dataclasses

from moe_flax.kernels.grouped_matmul.triton.launch import Chip


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The fixed configuration of one kernel call.

    Attributes:
      rows, columns, depth: the tile; a fused product has as many columns in each branch.
      warps, stages: per program, and of the software pipeline.
      span: row tiles that share columns before the next columns come.
      programs: per multiprocessor.
      specialised: use the warp-specialised Hopper kernel.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    span: int = 8
    programs: int = 1
    specialised: bool = False


def shared_bytes(tiles: Tiles, itemsize: int, branches: int = 1) -> int:
    """Shared memory that the pipeline's stages take."""
    step = (tiles.rows + tiles.columns * branches) * tiles.depth * itemsize
    return step * tiles.stages


def rows_class(rows: int, groups: int) -> int:
    """The tile height that suits an average group: 16, 32, 64 or 128 rows."""
    average = rows / max(groups, 1)
    for height in (16, 32, 64):
        if average <= height * 1.25:
            return height
    return 128


def product_tiles(chip: Chip, rows: int, groups: int, itemsize: int, branches: int) -> Tiles:
    """Tiles of a product; `branches` is 2 where gate and up share a tile."""
    height = rows_class(rows, groups)
    depth = 128 // itemsize
    if height <= 32:
        return Tiles(height, 128 // branches, depth * 2, 4, 4 if chip.tma else 3, programs=1)
    if height == 64:
        return Tiles(64, 256 // branches if chip.tma else 128 // branches, depth, 4, 4)
    if chip.tma:
        return Tiles(128, 256 // branches, depth, 8, 4 if branches == 1 else 3)
    return Tiles(128, 128 // branches, depth // 2, 8 if branches == 2 else 4, 3)


def contraction_tiles(chip: Chip, itemsize: int) -> Tiles:
    """Tiles of a contraction: `rows` are summed, `depth` x `columns` are written."""
    if itemsize == 4:
        return Tiles(32, 64, 64, 4, 3)
    if chip.tma:
        return Tiles(64, 256, 128, 8, 3)
    return Tiles(32, 128, 128, 4, 4)

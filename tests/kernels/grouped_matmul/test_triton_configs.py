"""Which tiles a product gets: the measured table first, the heuristic where it is silent."""

import dataclasses

import pytest

from moe_flax.kernels.grouped_matmul.triton import configs
from moe_flax.kernels.grouped_matmul.triton.launch import Chip

HOPPER, AMPERE = Chip(90, 132), Chip(80, 108)
LONG = configs.Shape("product", 32768, 8, 4096, 14336, 2)
MEASURED = (128, 128, 64, 4, 4, 8, 2, False)


@pytest.fixture
def table(monkeypatch):
    """An entry for LONG and whatever shares its class."""
    key = (90, *configs.shape_class(LONG))
    monkeypatch.setattr(configs, "TABLE", {key: (MEASURED, False)})


def test_shapes_of_one_class_share_an_entry(table):
    near = dataclasses.replace(LONG, rows=30000, k=4000, n=15000)
    for shape in (LONG, near):
        assert configs.choose(HOPPER, shape) == (configs.Tiles(*MEASURED), False)
    for other in (
        dataclasses.replace(LONG, k=8192),
        dataclasses.replace(LONG, n=4096),
        dataclasses.replace(LONG, rows=4096),
        dataclasses.replace(LONG, itemsize=4),
        dataclasses.replace(LONG, kind="transposed"),
        dataclasses.replace(LONG, branches=2),
    ):
        assert configs.choose(HOPPER, other) == configs.heuristic(HOPPER, other)
    assert configs.choose(AMPERE, LONG) == configs.heuristic(AMPERE, LONG)


def test_an_entry_of_other_rows_than_are_settled_is_passed_over(table):
    assert configs.choose(HOPPER, LONG, 64)[0].rows == 64
    assert configs.choose(HOPPER, LONG, 128)[0] == configs.Tiles(*MEASURED)


def test_the_warp_specialised_kernel_only_where_it_fits(monkeypatch):
    special = (128, 256, 64, 4, 4, 8, 1, True)
    key = (90, *configs.shape_class(LONG))
    monkeypatch.setattr(configs, "TABLE", {key: (special, False)})
    monkeypatch.setattr(Chip, "wgmma", True)
    assert configs.choose(HOPPER, LONG)[0].specialised
    assert not configs.choose(HOPPER, dataclasses.replace(LONG, k=4100))[0].specialised
    monkeypatch.setattr(Chip, "wgmma", False)
    assert not configs.choose(HOPPER, LONG)[0].specialised


@pytest.mark.parametrize(
    ("average", "height"), [(1, 16), (16, 32), (32, 64), (64, 128), (999, 128)]
)
@pytest.mark.parametrize("kind", ["fused", "product", "transposed", "summed"])
def test_tiles_are_as_high_as_groups_are_long(kind, average, height):
    shape = configs.Shape(kind, 8 * average, 8, 1024, 2048, 2, 2)
    assert configs.heuristic(HOPPER, shape)[0].rows == height
    assert configs.heuristic(HOPPER, shape, 64)[0].rows == 64


def test_every_entry_is_of_a_known_kind_and_a_whole_tile():
    for (_, bits, kind, *_), (tiles, gather_first) in configs.TABLE.items():
        assert kind in configs.KINDS
        assert bits in (16, 32)
        assert isinstance(gather_first, bool)
        assert configs.Tiles(*tiles).rows in (16, 32, 64, 128)

"""The TPU backend's arithmetic; XLA runs the same products on CPU."""

from grouped_matmul_base import GroupedMatmulBase


class TestTpu(GroupedMatmulBase):
    backend = "tpu"

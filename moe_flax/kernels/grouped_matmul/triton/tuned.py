"""Tiles by chip and class of shape, measured by benchmarks/gpu_tune.py; do not edit.

Keys: compute capability and `configs.shape_class`. Values: arguments of `Tiles`, and
whether rows are gathered before a fused product.
"""

TABLE: dict[tuple, tuple[tuple, bool]] = {}

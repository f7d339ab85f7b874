"""Float weights to few bits and scales, for checkpoints: the inverse of `quantized`, with loss."""

import dataclasses
import math
import typing as tp

import ml_dtypes
import numpy as np

from moe_flax.checkpoint.errors import fault


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way to quantize a stored [out, in] matrix.

    Args:
      dtype: of the values.
      window: rows and columns that share a scale; 0 is the whole axis.
      suffix: what the scales' name adds to the values'.
      config: the quantization_config that announces it.
    """

    dtype: np.dtype
    window: tuple[int, int]
    suffix: str
    config: tp.Mapping[str, tp.Any]


def _compressed(name: str, bits: int, kind: str, group: int | None) -> dict[str, tp.Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["re:.*experts.*"], "weights": weights}},
    }


_F8, _I8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
SCHEMES: tp.Final[dict[str, Scheme]] = {
    "fp8_channel": Scheme(_F8, (1, 0), "_scale", _compressed("float-quantized", 8, "float", None)),
    "fp8_window": Scheme(_F8, (1, 128), "_scale", _compressed("float-quantized", 8, "float", 128)),
    "int8_channel": Scheme(_I8, (1, 0), "_scale", _compressed("int-quantized", 8, "int", None)),
    "int8_window": Scheme(_I8, (1, 128), "_scale", _compressed("int-quantized", 8, "int", 128)),
    "fp8_block": Scheme(
        _F8,
        (128, 128),
        "_scale_inv",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
}


def quantization_config(scheme: str, outputs: tp.Iterable[tp.Any]) -> dict[str, tp.Any]:
    """The quantization_config of a checkpoint in which only some matrices are quantized.

    Args:
      scheme: a name in ``SCHEMES``.
      outputs: all of its tensors, with name, dtype and shape. Every matrix that is a module's
        ``weight`` and has no scale is listed as not quantized: readers would ask for its scale.
    """
    form, outputs = SCHEMES[scheme], list(outputs)
    names = {output.name for output in outputs}
    plain = [
        output.name.removesuffix(".weight")
        for output in outputs
        if output.name.endswith(".weight")
        and len(output.shape) == 2
        and output.name + form.suffix not in names
    ]
    fp8 = form.config["quant_method"] == "fp8"
    return {**form.config, ("modules_to_not_convert" if fp8 else "ignore"): plain}


def scale_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a matrix' scales: windows rounded up."""
    rows, columns = shape
    return (
        math.ceil(rows / scheme.window[0]) if scheme.window[0] else 1,
        math.ceil(columns / scheme.window[1]) if scheme.window[1] else 1,
    )


def quantize(matrix: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes an [out, in] matrix so that each window's largest magnitude is the dtype's own.

    Args:
      matrix: [out, in], any float dtype; all finite.
      scheme: a name in ``SCHEMES``.

    Returns:
      Values of the scheme's dtype, [out, in], and float32 scales, one a window.

    Raises:
      CheckpointError: the scheme is not known, or a value is not finite.
    """
    if scheme not in SCHEMES:
        raise fault(f"quantization scheme {scheme!r} is not known; known: {sorted(SCHEMES)}")
    form = SCHEMES[scheme]
    matrix = matrix.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise fault("a weight is not finite; it cannot be quantized")
    rows, columns = matrix.shape
    r, c = form.window[0] or rows, form.window[1] or columns
    padded = np.zeros((-(-rows // r) * r, -(-columns // c) * c), np.float32)
    padded[:rows, :columns] = matrix
    tiles = padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c)
    top = 127.0 if form.dtype == _I8 else float(ml_dtypes.finfo(form.dtype).max)
    largest = np.abs(tiles).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / np.float32(top), np.float32(1)).astype(np.float32)
    scaled = tiles / scales[:, None, :, None]
    scaled = np.clip(np.rint(scaled) if form.dtype == _I8 else scaled, -top, top)
    return scaled.reshape(padded.shape)[:rows, :columns].astype(form.dtype), scales

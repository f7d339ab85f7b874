"""Whole checkpoints from one form to another, tensor by tensor, without a device."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import typing as tp

import numpy as np

from moe_flax.checkpoint import families
from moe_flax.checkpoint.building import check_apart, stating
from moe_flax.checkpoint.convert import float_form, without_quantization
from moe_flax.checkpoint.encode import SCHEMES, quantization_config, quantize, scale_shape
from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.hf_config import float_dtype, rewrite_config
from moe_flax.checkpoint.layouts import PARAMETER_AXES
from moe_flax.checkpoint.mapping import Index, Parameter
from moe_flax.checkpoint.outputs import Cast, layer_outputs
from moe_flax.checkpoint.reader import INDEX_NAME, leads_outside
from moe_flax.checkpoint.source import Layer, Source, bind
from moe_flax.checkpoint.writer import DEFAULT_SHARD_BYTES, Output, write_checkpoint

_Add: tp.TypeAlias = tp.Callable[[float, float], None]
_COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")


class _Cast:
    """A parameter that is written in another dtype."""

    def __init__(self, parameter: Parameter, dtype: np.dtype):
        self.parameter, self.shape, self.dtype = parameter, parameter.shape, dtype

    def read_into(self, out: np.ndarray, index: Index) -> None:
        self.parameter.read_into(out, index)


class Errors:
    """What quantizing does to each layer: [‖error‖², ‖weights‖²], summed over its matrices.

    Attributes:
      wanted: whether anything is quantized.
      total: by layer, those of runs that were cut off included.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.total: dict[int, np.ndarray] = {}
        self._new: dict[int, np.ndarray] = {}

    def add(self, layer: int, error: float, weight: float) -> None:
        """Adds a matrix."""
        for sums in (self.total, self._new):
            sums[layer] = sums.get(layer, np.zeros(2)) + np.array([error, weight])

    def take(self) -> str:
        """See `writer.Notes`."""
        new, self._new = self._new, {}
        return json.dumps({str(layer): list(sums) for layer, sums in new.items()})

    def recall(self, note: str) -> None:
        """See `writer.Notes`."""
        for layer, (error, weight) in json.loads(note).items():
            self.add(int(layer), error, weight)
        self._new = {}

    def relative(self) -> dict[int, float]:
        """‖error‖ / ‖weights‖ by layer."""
        return {n: float((e / w) ** 0.5) for n, (e, w) in sorted(self.total.items()) if w}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion before it runs.

    Attributes:
      source: the opened checkpoint.
      layers: where each MoE layer goes.
      outputs: every tensor to write, in order.
      hf_config: the config.json to write.
      files: further files, copied.
      errors: filled while a quantizing conversion runs.
    """

    source: Source
    layers: dict[int, Layer]
    outputs: list[Output]
    hf_config: dict[str, tp.Any]
    files: dict[str, bytes]
    errors: "Errors"
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that it writes."""
        return sum(output.nbytes for output in self.outputs)

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        progress: tp.Callable[[int], tp.Any] = lambda n: None,
    ) -> None:
        """Runs it; see `write_checkpoint`. A run that was cut off is continued."""
        check_apart(pathlib.Path(self.source.file), pathlib.Path(path))
        config = json.dumps(self.hf_config, indent=2, sort_keys=True).encode() + b"\n"
        write_checkpoint(
            path,
            self.outputs,
            {**self.files, "config.json": config},
            shard_bytes=shard_bytes,
            progress=progress,
            fingerprint=self.fingerprint,
            notes=self.errors if self.errors.wanted else None,
        )

    def describe(self, *, orbax: bool = False) -> tp.Iterator[str]:
        """Lines that say which keys become which, or which parameters of a layer in Orbax."""
        for numbers, (old, new) in self._groups():
            target = "orbax" if orbax else new.form.name
            yield f"layers {ranges(numbers)}: {old.form.name} -> {target}"
            for entry in new.form.entries:
                if entry.parameter not in new.bindings:
                    continue
                before = next(e for e in old.form.entries if e.parameter == entry.parameter)
                after = f"{_template(new, entry.key, entry.branches)} [{entry.axes}]"
                if orbax:
                    after = f"{entry.parameter} [{PARAMETER_AXES[entry.parameter]}]"
                yield f"  {_template(old, before.key, before.branches)} [{before.axes}] -> {after}"
        yield f"passed through: {len(self.source.rest)} tensors"
        if self.source.beyond:
            yield beyond_line(self.source)

    def _groups(self) -> tp.Iterator[tuple[list[int], tuple[Layer, Layer]]]:
        def kind(index: int) -> tuple[str, str]:
            return self.source.layers[index].form.name, self.layers[index].form.name

        for _, group in itertools.groupby(sorted(self.layers), kind):
            numbers = list(group)
            yield numbers, (self.source.layers[numbers[0]], self.layers[numbers[0]])


def _template(layer: Layer, key: str | None, branches: tuple[str, ...]) -> str:
    return layer.prefix + (key or "(zero)").replace("{J}", f"{{{','.join(branches)}}}")


def beyond_line(source: Source) -> str:
    """What becomes of layers past the last one."""
    return (
        f"layers {ranges(source.beyond)} are past the last one (num_hidden_layers);"
        " their tensors are passed through, not converted"
    )


def ranges(numbers: tp.Sequence[int]) -> str:
    """Layer numbers for people: ``0, 2-5, 9``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def plan(
    source: Source,
    *,
    family: str | None = None,
    form: str | None = None,
    dtype: tp.Any = None,
    scheme: str | None = None,
) -> Plan:
    """Plans a conversion to safetensors.

    Args:
      source: the checkpoint to read.
      family: the model type to write; by default its own.
      form: the on-disk form; by default each layer's own, or the family's first.
      dtype: of the experts' weights and of other matrices; None keeps theirs, and gives
        quantized ones the dtype that config.json names, else bfloat16. Router weights, correction
        biases and vectors keep theirs always.
      scheme: quantize the experts' matrices, see `encode.SCHEMES`; a form that stores one tensor
        an expert and projection.

    Raises:
      CheckpointError: the family or form does not exist, or cannot hold these layers.
    """
    source.check_head()
    row = families.find(family) if family else source.family
    same = row is source.family
    if scheme is not None and scheme not in SCHEMES:
        raise fault(f"quantization scheme {scheme!r} is not known; known: {sorted(SCHEMES)}")
    cast = conversion_cast(source, dtype)
    layers: dict[int, Layer] = {}
    outputs: list[Output] = []
    errors = Errors()
    for index, bound in source.layers.items():
        target = bound
        if not same or form not in (None, bound.form.name) or bound.form.floats:
            wanted = float_form(row, form, bound.form if same else None)
            origin = bound if same else None
            target = bind(row, wanted, bound.config, index, source.config.num_layers, origin)
        parameters: dict[str, Parameter] = {}
        for name, parameter in source.parameters(index).items():
            to = cast.parameter(source, name, bound.bindings[name])
            if scheme is not None and dtype is None:  # from one quantization to another: exact
                to = None if name in ("experts.wi", "experts.wo") else to
            parameters[name] = parameter if to is None else _Cast(parameter, to)
        layers[index] = target
        written = layer_outputs(target, parameters, {})
        if scheme is not None:
            errors.wanted = True
            written = _quantized(target, written, scheme, functools.partial(errors.add, index))
        outputs += written
    for name in source.rest:
        outputs.append(cast.rest(source, name))
    hf_config = without_quantization(source.hf_config)
    if not same:
        hf_config = rewrite_config(row, source.config, source.hf_config)
    hf_config = cast.config(hf_config)
    if scheme is not None:
        hf_config["quantization_config"] = quantization_config(scheme, outputs)
    options = {"family": row.name, "form": form, "dtype": str(cast), "scheme": scheme}
    return Plan(
        source,
        layers,
        outputs,
        hf_config,
        _side_files(pathlib.Path(source.file)),
        errors,
        json.dumps([options, _identity(pathlib.Path(source.file))]),
    )


def conversion_cast(source: Source, dtype: tp.Any) -> Cast:
    """The dtypes of a conversion, see `plan`."""
    to = None if dtype is None else np.dtype(dtype)
    return Cast(to, float_dtype(source.hf_config))


def _quantized(layer: Layer, outputs: list[Output], scheme: str, add: _Add) -> list[Output]:
    """The experts' matrices as values and scales, the rest as they are."""
    matrices = {
        key
        for name, binding in layer.bindings.items()
        if name in ("experts.wi", "experts.wo")
        for key in binding.keys
    }
    found = []
    for output in outputs:
        if output.name not in matrices:
            found.append(output)
            continue
        if len(output.shape) != 2 or not output.name.endswith(".weight"):
            raise fault(
                f"form {layer.form.name} has no matrix an expert; quantize into a per-expert form",
                tensor=output.name,
            )
        found += _pair(output, scheme, add)
    return found


def _pair(output: Output, scheme: str, add: _Add) -> list[Output]:
    form = SCHEMES[scheme]

    def halves() -> tuple[np.ndarray, np.ndarray]:
        (matrix,) = output.chunks()
        try:
            return quantize(matrix, scheme)
        except ValueError as problem:
            raise fault(str(problem), tensor=output.name) from None

    def values() -> list[np.ndarray]:
        (matrix,) = output.chunks()
        q, scales = halves()
        rows, columns = matrix.shape
        wide = np.repeat(np.repeat(scales, form.window[0] or rows, 0), form.window[1] or columns, 1)
        exact = matrix.astype(np.float32)
        difference = q.astype(np.float32) * wide[:rows, :columns] - exact
        add(float(np.square(difference).sum()), float(np.square(exact).sum()))
        return [q]

    shape = scale_shape(form, output.shape)
    return [
        Output(output.name, form.dtype, output.shape, values),
        Output(output.name + form.suffix, np.dtype(np.float32), shape, lambda: [halves()[1]]),
    ]


def _side_files(directory: pathlib.Path) -> dict[str, bytes]:
    """The small files beside the weights: tokenizer, generation settings, licence."""
    skipped = {"config.json", INDEX_NAME, "pytorch_model.bin.index.json"}
    found = {}
    for path in sorted(directory.glob("*")):
        if path.suffix not in _COPIED or path.name in skipped or path.is_dir():
            continue
        if leads_outside(path, directory):
            raise fault("is a link out of the checkpoint's directory; remove it", file=path)
        with stating(path):
            if path.stat().st_size < 1 << 28:
                found[path.name] = path.read_bytes()
    return found


def _identity(directory: pathlib.Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a directory's files: whether it is still the same one."""
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.glob("*"))
        if path.is_file()
    ]

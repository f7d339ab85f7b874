"""Parameters to Orbax and back an expert at a time: what Orbax sees of one is a name and a shape.

Orbax asks for whole arrays and makes copies of its own, several layers' worth. Its type handlers
are the way in: a leaf of type `Streamed` is read from the checkpoint while it is written. The files
are those of any NumPy array in Orbax (Zarr, not compressed), so plain Orbax restores them.
"""

import concurrent.futures
import pathlib
import typing as tp

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.mapping import Index, Parameter, read

_WORKERS: tp.Final = 4  # chunks in memory at a time: some are read while others are written


class Streamed:
    """A leaf of a tree to save: a parameter, and the dtype it gets.

    Args:
      parameter: it is read when it is written, a row of its first axis at a time.
      dtype: what it is written as.
      by_row: a chunk for each row of the first axis, so that whoever restores some experts reads
        no others; else one chunk.
      progress: called with the number of bytes written.
    """

    def __init__(
        self,
        parameter: Parameter,
        dtype: np.dtype,
        *,
        by_row: bool,
        progress: tp.Callable[[int], tp.Any] = lambda n: None,
    ):
        self.parameter, self.dtype, self.by_row, self.progress = parameter, dtype, by_row, progress
        self.shape = tuple(parameter.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def write(self, directory: pathlib.Path) -> None:
        """Writes it as a Zarr array; returns when it is on the disk."""
        rows = 1 if self.by_row else self.shape[0]
        layout = {"compressor": None, "chunks": [rows, *self.shape[1:]]}
        store = tensorstore.open(
            _spec(directory) | {"metadata": layout, "store_data_equal_to_fill_value": True},
            create=True,
            open=True,
            shape=self.shape,
            dtype=tensorstore.dtype(self.dtype),
        ).result()

        def copy(start: int) -> int:
            index = (slice(start, start + rows), *(slice(0, n) for n in self.shape[1:]))
            chunk = read(self.parameter, index, self.dtype)
            try:
                store[index].write(chunk, can_reference_source_data_indefinitely=True).result()
            except (ValueError, OSError) as error:  # what TensorStore makes of a full disk
                raise fault(f"cannot be written ({error})", file=directory) from error
            return chunk.nbytes

        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
            for written in pool.map(copy, range(0, self.shape[0], rows)):
                self.progress(written)


def _spec(directory: pathlib.Path) -> dict[str, tp.Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/"}}


class _Writing:
    """An Orbax future: the writing of one leaf after another."""

    def __init__(self, leaves: tp.Sequence[tuple[Streamed, pathlib.Path]]):
        self._leaves = leaves

    def result(self, timeout: float | None = None) -> None:
        del timeout
        while self._leaves:
            leaf, directory = self._leaves[0]
            leaf.write(directory)
            self._leaves = self._leaves[1:]


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes `Streamed` leaves; to Orbax they are NumPy arrays."""

    async def serialize(
        self, values: tp.Sequence[tp.Any], infos: tp.Sequence[tp.Any], args: tp.Any = None
    ) -> list[_Writing]:
        """Returns what writes them when Orbax waits for it."""
        del args
        for info in infos:
            await info.await_path_creation()
        return [_Writing([(v, i.path) for v, i in zip(values, infos, strict=True)])]


def save_tree(path: pathlib.Path, tree: tp.Mapping[str, Streamed]) -> None:
    """Saves leaves as an Orbax checkpoint; Orbax renames the directory when it is complete.

    Args:
      path: the directory; absent.
      tree: the leaves by name.
    """
    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (Streamed, _Handler()), (jax.Array, handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(tree)))


class Restored:
    """A parameter in such a checkpoint, read chunk by chunk; the last few stay in memory.

    Args:
      directory: the checkpoint.
      name: the leaf's.
      shape, dtype: what Orbax' metadata says of it.
    """

    def __init__(self, directory: pathlib.Path, name: str, shape: tuple[int, ...], dtype: np.dtype):
        self._directory, self.name, self.shape, self.dtype = directory, name, shape, dtype
        self._store: tp.Any = None

    def read_into(self, out: np.ndarray, index: Index) -> None:
        """Copies the part at ``index`` into ``out``."""
        file = self._directory / self.name
        try:
            store = self._open(file)
            out[...] = store[index].read().result()
        except (ValueError, IndexError, OSError) as error:  # such as a chunk's file that is missing
            raise fault(f"cannot be read ({error})", file=file, tensor=self.name) from error

    def _open(self, file: pathlib.Path) -> tp.Any:
        if self._store is None:
            row = int(np.prod(self.shape[1:])) * self.dtype.itemsize
            pool = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2 * row}})
            spec = _spec(file) | {"fill_missing_data_reads": False}
            store = tensorstore.open(spec, open=True, context=pool).result()
            found = tuple(store.shape), store.dtype.numpy_dtype
            if found != (self.shape, self.dtype):
                raise ValueError(f"it has {found}, the metadata says {(self.shape, self.dtype)}")
            self._store = store
        return self._store


def restored_tree(path: pathlib.Path) -> dict[str, Restored]:
    """The leaves of a checkpoint that `save_tree` wrote, by name.

    Raises:
      CheckpointError: Orbax does not know it as one.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
        if found is None:
            raise fault("a file of its metadata, or an array's .zarray, is missing or broken")
        return {
            name: Restored(path, name, tuple(meta.shape), np.dtype(meta.dtype))
            for name, meta in dict(found).items()
        }
    except Exception as error:  # whatever Orbax meets in broken files
        raise fault(f"is no Orbax checkpoint of a layer ({error})", file=path) from error

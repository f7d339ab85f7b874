"""Real text that every machine has: the source files of Python's own standard library."""

import pathlib
import sysconfig
import typing as tp

import numpy as np

VALIDATION_EVERY = 10  # every tenth file is kept for validation, whole


class Corpus(tp.NamedTuple):
    """Bytes of the training files and of the validation files, each joined in order."""

    train: np.ndarray
    validation: np.ndarray
    num_files: int


def standard_library() -> Corpus:
    """Reads the modules of the standard library, sorted by name; the same every time.

    Raises:
      FileNotFoundError: this Python comes without its library's source.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.glob("*.py")) if "_sysconfigdata" not in path.name]
    if len(files) < VALIDATION_EVERY:
        raise FileNotFoundError(f"no source of the standard library in {folder}")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(files):
        parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(path.read_bytes())
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return Corpus(train, validation, len(files))


def random_windows(
    text: np.ndarray, batch: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """[batch, length] int32: windows of ``text`` that start anywhere."""
    starts = rng.integers(0, len(text) - length, size=batch)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def even_windows(text: np.ndarray, batch: int, length: int) -> np.ndarray:
    """[batch, length] int32: windows spread evenly over ``text``."""
    starts = np.linspace(0, len(text) - length, batch).astype(int)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)

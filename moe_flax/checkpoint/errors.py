"""The one error that a checkpoint can raise: it names the file and the tensor."""

import contextlib
import os
import typing as tp


class CheckpointError(ValueError):
    """A checkpoint's files, tensors or configuration are not what they should be."""


def fault(problem: str, *, file: str | os.PathLike[str] = "", tensor: str = "") -> CheckpointError:
    """Builds the error: where it is, then what is wrong."""
    where = [str(file)] if file else []
    if tensor:
        where.append(f"tensor {tensor!r}")
    return CheckpointError(": ".join([*where, problem]))


@contextlib.contextmanager
def reading_config(file: str | os.PathLike[str] = "") -> tp.Iterator[None]:
    """Turns what odd values in a config.json cause into an error that names the file."""
    with reading_json(file, "config.json is malformed"):
        yield


@contextlib.contextmanager
def reading_json(
    file: str | os.PathLike[str] = "", problem: str = "is malformed"
) -> tp.Iterator[None]:
    """`reading_config` for any file."""
    try:
        yield
    except CheckpointError as error:
        if file and str(file) not in str(error):
            raise fault(str(error), file=file) from None
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise fault(f"{problem}: {type(error).__name__}: {error}", file=file) from error

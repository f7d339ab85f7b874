"""The one error that a checkpoint can raise: it names the file and the tensor."""

import os


class CheckpointError(ValueError):
    """A checkpoint's files, tensors or configuration are not what they should be."""


def fault(problem: str, *, file: str | os.PathLike[str] = "", tensor: str = "") -> CheckpointError:
    """Builds the error: where it is, then what is wrong."""
    where = [str(file)] if file else []
    if tensor:
        where.append(f"tensor {tensor!r}")
    return CheckpointError(": ".join([*where, problem]))

"""A directory that appears under its name when it is complete, and is built beside it until then.

PATH.incomplete holds what is there so far and a mark: the plan. When all is there, the directory
takes a name that has the plan in it, so that it can lose the mark and still be known after a cut.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import typing as tp

from moe_flax.checkpoint.errors import CheckpointError, fault

MARK_NAME: tp.Final = "plan.sha256"
NOTE_SUFFIX: tp.Final = ".note"  # files that only the building needs


def incomplete(path: pathlib.Path) -> pathlib.Path:
    """The directory that an unfinished checkpoint lies in, beside its final place."""
    return path.with_name(path.name + ".incomplete")


def check_target(path: pathlib.Path) -> None:
    """Raises a CheckpointError where something is at the target already."""
    with stating(path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise fault("exists and is no directory; remove it or choose another path", file=path)
        if path.exists() and any(path.iterdir()):
            raise fault("is not empty; remove it or choose another path", file=path)


def check_apart(source: pathlib.Path, path: pathlib.Path) -> None:
    """Raises a CheckpointError where a target is the source, or lies in it."""
    with stating(path):
        if path.resolve().is_relative_to(source.resolve()):
            problem = (
                "lies in the directory that is read" if path != source else "is read and written"
            )
            raise fault(f"{problem}, {source}; choose another path", file=path)


class Building:
    """A directory in the making.

    Args:
      path: where it goes; absent or empty.
      plan: all that its content depends on; a run with another plan starts anew.
      continued: whether one with the same plan continues what it finds.

    Raises:
      CheckpointError: something is at the target.
    """

    def __init__(self, path: pathlib.Path, plan: str, *, continued: bool = True):
        self._path, self._continued = path, continued
        self._plan = hashlib.sha256(plan.encode()).hexdigest()
        self.directory = incomplete(path)
        self._complete = self.directory.with_name(f"{self.directory.name}-{self._plan[:16]}")
        check_target(path)

    def begin(self) -> bool:
        """Makes the directory; returns False where a run before has written everything.

        Raises:
          CheckpointError: there is a directory of this name that no run before has made, or a link.
        """
        work, mark = self.directory, self.directory / MARK_NAME
        with stating(work):
            if self._complete.is_dir() and not self._complete.is_symlink():
                if self._continued:
                    return False
                shutil.rmtree(self._complete)
            if work.is_symlink() or (work.exists() and not work.is_dir()):
                raise fault("is in the way and no directory; remove it", file=work)
            if work.is_dir():
                known = mark.is_file() and not mark.is_symlink()
                names = {entry.name for entry in work.iterdir()}
                if not known and not names <= {MARK_NAME + ".partial"}:
                    problem = f"is in the way and no unfinished checkpoint (it has no {MARK_NAME})"
                    raise fault(f"{problem}; remove it or choose another path", file=work)
                if not known or not self._continued or mark.read_text() != self._plan:
                    shutil.rmtree(work)
            work.mkdir(parents=True, exist_ok=True)
            replace_bytes(mark, self._plan.encode())
        return True

    def finish(self) -> None:
        """Gives the directory its name."""
        with stating(self._path):
            if not self._complete.exists():
                os.rename(self.directory, self._complete)
            for note in self._complete.glob(f"*{NOTE_SUFFIX}"):
                note.unlink()
            (self._complete / MARK_NAME).unlink(missing_ok=True)
            if self._path.exists():
                self._path.rmdir()
            os.rename(self._complete, self._path)
            sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Removes what there is so far."""
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def stating(file: pathlib.Path) -> tp.Iterator[None]:
    """Turns errors of the file system into one that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else file
        raise fault(f"cannot be used ({error.strerror or error})", file=name) from error


@contextlib.contextmanager
def writable(file: pathlib.Path) -> tp.Iterator[tp.BinaryIO]:
    """A new file to write; one that is there, or a link, is replaced and not written through."""
    try:
        file.unlink(missing_ok=True)
        with open(file, "xb") as handle:
            yield handle
    except OSError as error:
        raise fault(f"cannot be written ({error.strerror})", file=file) from error


def replace_bytes(file: pathlib.Path, content: bytes) -> None:
    """Writes a small file whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    with writable(partial) as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, file)


def sync_directory(path: pathlib.Path) -> None:
    """Waits until a directory's names are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

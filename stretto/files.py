"""Files that are replaced in one step: who is killed at any moment leaves the old one whole, or the new one.

The new content is written beside the file, under a name that is also the lock of whoever writes: two processes take
turns, and what a killed one has left is written over by the next.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nobody waits there, and each process writes under a name of its own
    fcntl = None  # type: ignore[assignment]

PATIENCE = 1.0  # seconds that one writer waits for another
_MODE = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """What the block writes takes the place of `path` when it ends; after an exception nothing has changed.

    durable: also when the machine itself goes down at any moment, which costs some milliseconds.

    The block has the file to itself: what it reads from `path` is still there when its own content replaces it. Raises
    OSError where the file cannot be written, also where another process writes it for more than a second.
    """
    beside = _beside(path)
    with _locked(beside) as out:
        try:
            out.truncate()
            yield out
            out.flush()
            if durable:
                os.fsync(out.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    if durable:
        _settle(path.parent)


def expect_writable(path: Path) -> None:
    """Raise OSError now where `replacing` would."""
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder")
    beside = _beside(path)
    with _locked(beside):
        beside.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp" if fcntl else f"{path.name}.{os.getpid()}.tmp")


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """The file at `path`, which follows no link, once nobody else has it."""
    until = time.monotonic() + PATIENCE
    while True:
        with open(os.open(path, _MODE, 0o666), "r+b") as file:
            if _taken(file, until, path) and _is_at(file, path):
                yield file
                return
        # Whoever had it has renamed or removed it meanwhile: this one is no longer beside anything.


def _taken(file: IO[bytes], until: float, path: Path) -> bool:
    while fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another process writes {str(path)!r}") from None
            time.sleep(0.002)
        else:
            break
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _settle(folder: Path) -> None:
    """The folder's own entry reaches the disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

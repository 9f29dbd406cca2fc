"""One way to say what was wrong: StrettoError and expect()."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class StrettoError(ValueError):
    """Bad input. The message names the argument, what was wanted and what came."""


class IndexRangeError(StrettoError, IndexError):
    """An index points outside of what it indexes. An IndexError too, as stock raises: who catches that still does."""


def fail(message: str) -> NoReturn:
    """Raise StrettoError(message)."""
    raise StrettoError(message)


def expect(condition: bool, message: str) -> None:
    """Raise StrettoError(message) unless condition holds.

    `message` reads like: "spmm: 'x' has 5 rows, but the graph has 7 columns (graph 9x7, x 5x16)".
    Callers on a hot path test the condition themselves and call fail(), so that the message is built only when needed.
    """
    if not condition:
        raise StrettoError(message)


@contextmanager
def told_by(who: str, other: str) -> Iterator[None]:
    """Name `who` instead of `other` in a StrettoError raised inside the block: users called the former."""
    try:
        yield
    except StrettoError as error:
        text = str(error)
        if text.startswith(f"{other}: "):
            error.args = (who + text.removeprefix(other),)
        raise

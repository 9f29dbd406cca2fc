"""Choices on disk: one JSON file per machine in the cache folder, merged under a lock, replaced in one step.

A corrupt or foreign file is ignored, aloud. Two processes writing at once lose nothing: each reads what is there under
the lock, adds its own and renames a complete new file over the old one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto import settings
from stretto.machine import facts as machine

logger = logging.getLogger("stretto")

FORMAT = 1


def path(kind: str, facts: dict[str, object]) -> Path:
    """Where choices of a kind ("kernels", "plans", ...) for a machine live."""
    return settings.cache_folder() / f"{kind}-{machine.key(facts)}.json"


def read(kind: str, facts: dict[str, object]) -> dict[str, Any]:
    """The choices kept for this machine; empty if there are none that can be trusted."""
    file = path(kind, facts)
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT or content["machine"] != facts:
            logger.warning("stretto: %s was written for another machine or version; ignored", file)
            return {}
        if not isinstance(content["choices"], dict):
            raise TypeError("'choices' is not a table")
        return content["choices"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("stretto: %s cannot be read (%s); ignored", file, error)
        return {}


def add(kind: str, facts: dict[str, object], choices: dict[str, Any]) -> None:
    """Merge choices into the machine's file. A folder that cannot be written is said once and not fatal."""
    file = path(kind, facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            content = {"format": FORMAT, "machine": facts, "choices": {**read(kind, facts), **choices}}
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
            with os.fdopen(handle, "w") as out:
                json.dump(content, out, indent=1, sort_keys=True)
            os.replace(name, file)
    except OSError as error:
        logger.warning("stretto: tuning results are not kept: %s", error)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as handle:
        try:
            import fcntl
        except ImportError:  # not on Windows: the rename alone keeps the file whole there
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)

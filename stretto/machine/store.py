"""Choices on disk: one JSON file per machine in the cache folder, merged and replaced in one step.

A corrupt or foreign file is ignored, aloud: what was read is what was written, or its checksum tells. Two processes
writing at once lose nothing: each reads what is there under the lock, adds its own and renames a complete new file over
the old one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from stretto import files, settings
from stretto.machine import facts as machine

logger = logging.getLogger("stretto")

FORMAT = 2


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
        if content["checksum"] != _checksum(content["choices"]):
            raise ValueError("its checksum is another")
        return content["choices"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("stretto: %s cannot be read (%s); ignored", file, error)
        return {}


def add(kind: str, facts: dict[str, object], choices: dict[str, Any]) -> None:
    """Merge choices into the machine's file. A folder that cannot be written is said once and not fatal."""
    file = path(kind, facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(file, durable=False) as out:
            merged = {**read(kind, facts), **choices}
            content = {"format": FORMAT, "machine": facts, "choices": merged, "checksum": _checksum(merged)}
            out.write(json.dumps(content, indent=1, sort_keys=True).encode())
    except OSError as error:
        logger.warning("stretto: tuning results are not kept: %s", error)


def _checksum(choices: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()

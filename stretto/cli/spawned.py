"""`python -m stretto SCRIPT` in processes that the script starts anew (spawn, forkserver): patched like the first one.

A forked child has the parent's patched classes. A spawned one begins with a fresh interpreter, which runs the parent's
main script under the name __mp_main__ before anything else, as multiprocessing's preparation data tell it to. reach()
lets these data name this module instead; run as __mp_main__, it patches and then runs the script, so that the child
finds everything where it would be without us.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import runpy
from pathlib import Path
from typing import Any

from stretto import settings

_stock = multiprocessing.spawn.get_preparation_data


def reach() -> None:
    """From now on processes that this one spawns are patched, too, and those that they spawn."""
    multiprocessing.spawn.get_preparation_data = _preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """What multiprocessing tells a new process, with this module in front of the script."""
    data: dict[str, Any] = _stock(name)
    script = data.pop("init_main_from_path", None)
    if script is not None:
        os.environ["STRETTO_SCRIPT"] = script
        data["init_main_from_name"] = "stretto.cli.spawned"
        home = str(Path(__file__).resolve().parent.parent)  # `python -m` may have found us in a folder that is left now
        if home not in data["sys_path"]:
            data["sys_path"] = [*data["sys_path"], home]
    return data


if __name__ == "__mp_main__":
    from stretto.cli import spawned
    from stretto.plug import accelerate as plugin

    plugin.patch()
    spawned.reach()
    globals().update(runpy.run_path(settings.get("STRETTO_SCRIPT"), run_name="__mp_main__"))

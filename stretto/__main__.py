"""`python -m stretto SCRIPT args` runs the script with the plug-in on; anything else is the command line."""

import importlib
import runpy
import sys
from pathlib import Path

from stretto.errors import StrettoError, expect


def run_script(script: str, arguments: list[str]) -> None:
    """Run `script` as `python SCRIPT arguments` would, with the plug-in on, also in processes that it starts."""
    try:
        expect(Path(script).is_file(), f"no script {script!r}")
    except StrettoError as error:
        sys.exit(f"stretto: {error}")
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    importlib.import_module("stretto.plug.accelerate").patch()
    importlib.import_module("stretto.cli.spawned").reach()
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """A script if the first argument names one, else the command line. A command goes before a file of its name."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if not first.endswith(".py"):
        from stretto import cli

        if first in (*cli.COMMANDS, "bench") or not Path(first).is_file():
            cli.main()
            return
    run_script(first, sys.argv[2:])


if __name__ == "__main__":
    main()

"""The command line: an explicit table of commands, each imported when it is asked for.

To add a command, write a function with typer options in a module of its own and add its line to the table.
A class `Command` beside it is how its words are read, where they are read in a way of their own.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from stretto.errors import StrettoError, expect

# name -> "module:function"
COMMANDS = {
    "demo": "stretto.cli.demo:command",
    "doctor": "stretto.cli.doctor:command",
    "tune": "stretto.cli.tune:command",
    "convert": "stretto.cli.convert:command",
    "train": "stretto.cli.train:command",
    "profile": "stretto.cli.profile:command",
    "analyze": "stretto.cli.analyze:command",
}

# stretto bench NAME -> "module:function", in the source tree: a wheel does not hold the suites
BENCHES = {
    "ops": "benchmarks.suites.ops:command",
    "latency": "benchmarks.suites.latency:command",
    "loader": "benchmarks.suites.loader:command",
    "models": "benchmarks.suites.models:command",
    "grid": "benchmarks.suites.grid:command",
    "gpu": "benchmarks.suites.gpu:command",
    "tune": "benchmarks.suites.tuning:command",
}


class _Table(TyperGroup):
    """A group whose commands are the lines of a table."""

    table: dict[str, str]

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *self.table]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        name, function = self.table[cmd_name].split(":")
        module, single = importlib.import_module(name), typer.Typer(add_completion=False)
        single.command(name=cmd_name, cls=getattr(module, "Command", None))(getattr(module, function))
        return typer.main.get_command(single)


class _Commands(_Table):
    table = COMMANDS


class _Benches(_Table):
    table = BENCHES

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        find_suites()
        return super().get_command(ctx, cmd_name)


def find_suites() -> None:
    """Let `benchmarks.suites` be imported from the source tree that this package stands in."""
    root = Path(__file__).resolve().parents[2]
    wanted = "run `python -m stretto bench` in a checkout of stretto"
    expect((root / "benchmarks" / "suites").is_dir(), f"bench: the suites are in the source tree alone: {wanted}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(cls=_Benches, no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback()
def _about() -> None:
    """Graph neural networks written in PyTorch Geometric, several times faster, with two lines added."""


@bench.callback()
def _about_bench() -> None:
    """Check every candidate against a reference, then time all of them in turns."""


def main() -> None:
    """Entry point of the `stretto` command."""
    try:
        app(prog_name="stretto")
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(2)

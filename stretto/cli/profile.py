"""`stretto profile`: why a model is slow."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stretto.errors import expect, fail
from stretto.observe.models import MODELS
from stretto.observe.subject import subject, writable
from stretto.page.terminal import console
from stretto.profile.profiling import Profile, profile
from stretto.profile.script import alone, apply_script, profile_script
from stretto.profile.terminal import show_advice, show_applied, show_profile, show_replay

OF_A_SCRIPT = "options of a script go behind a lone --, as in: stretto profile train.py -- --epochs 10"


class Command(TyperCommand):
    """Says where the options of a script go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are no options."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # its class lies in click or in typer, as typer's version has it
            if type(error).__name__ == "NoSuchOption":
                error.message = f"{error.message}; {OF_A_SCRIPT}"  # type: ignore[attr-defined]
            raise


def command(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help=f"SCRIPT.py, FILE.py:FUNCTION, or {', '.join(MODELS)}.")] = "gcn",
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script; its options behind a lone --.")
    ] = None,
    graph: Annotated[
        str, typer.Option(help="For a built-in model: cora, a path to .npz, rmat:SCALE:EDGES, ...")
    ] = "cora",
    hidden: Annotated[int, typer.Option(help="Hidden width of a built-in model.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of a built-in model.")] = 2,
    mode: Annotated[str, typer.Option(help="train or infer.")] = "train",
    repeats: Annotated[int, typer.Option(help="Plain and traced steps to time.")] = 5,
    share: Annotated[float, typer.Option(help="Share of the time that the hot ops cover.")] = 0.9,
    replay: Annotated[bool, typer.Option(help="Replay the hot ops with their real and with shuffled indices.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Apply what is recommended and measure the step.")] = False,
    device: Annotated[str, typer.Option(help="Where a built-in model runs: cpu or cuda.")] = "cpu",
    machine: Annotated[str, typer.Option(help="auto: this machine, measured once; or a machine file.")] = "auto",
    html: Annotated[Path | None, typer.Option(help="Write the profile as one page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the profile as JSON.")] = None,
) -> None:
    """Every op of a step with its time, what bounds it, and what to do about it."""
    is_script = target.endswith(".py")
    expect(0 < share <= 1, f"profile: '--share' is {share}, wanted 0 < share <= 1")
    expect(repeats >= 1, f"profile: '--repeats' is {repeats}, wanted at least 1")
    if is_script:
        _refuse_of_a_script(context)
    elif arguments:
        fail(f"profile: {' '.join(arguments)!r} follows {target!r}, but only a script takes arguments")
    for option, path in (("html", html), ("json", json)):
        writable(path, f"profile: '--{option}'")
    if is_script:
        result = profile_script(target, arguments or [], machine, repeats=repeats)
    else:
        model, data = subject(target, graph, hidden, layers, device)
        result = profile(model, data, mode=mode, repeats=repeats, machine=machine)
        result.model = target
    result.share = share
    try:
        again = (target, arguments or []) if is_script else None
        _stages(result, again, repeats, replay, apply)
    finally:  # what was measured before a stage failed, or was interrupted, is kept
        for path, write in ((html, result.to_html), (json, result.to_json)):
            if path is not None:
                write(path)
    if result.failure is not None:  # of the first run, or of the second
        raise result.failure


def _stages(result: Profile, script: tuple[str, list[str]] | None, repeats: int, replay: bool, apply: bool) -> None:
    """What follows the profile, each stage shown as it ends. script: with its arguments."""
    out = console()
    show_profile(out, result, result.share)
    if isinstance(result.failure, KeyboardInterrupt):
        raise result.failure
    if replay:
        part = alone(result, repeats=repeats) if script else result
        result.replays = part.replay(share=result.share)
        show_replay(out, result)
    if not script:  # its layers were looked at while it ran
        result.recommend()
    show_advice(out, result)
    if apply:
        result.applied = apply_script(result, *script) if script else result.apply()
        show_applied(out, result)


def _refuse_of_a_script(context: typer.Context) -> None:
    """What describes a built-in model says nothing of a script."""
    for name in ("graph", "hidden", "layers", "mode", "device"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            fail(f"profile: '--{name}' is for a model that is named; {OF_A_SCRIPT}")

"""The profile on a terminal."""

from __future__ import annotations

from rich.console import Console

from stretto.page.terminal import say, show
from stretto.page.text import duration
from stretto.profile.profiling import Profile
from stretto.profile.words import REPLAY, REPLAYS, advice_line, replay_rows

HOT = ("op", "phase", "shapes", "where", "calls", "ms", "share", "bound", "attainable")


def show_profile(out: Console, profile: Profile, share: float) -> None:
    """The hot ops on a terminal."""
    t = profile.trace
    said = (
        f"{profile.model}: {duration(t.step_seconds)} a step, {t.launches} kernels, {t.attributed:.1%} attributed "
        f"({t.in_ops:.0%} inside ops), traced at {t.traced_seconds / t.step_seconds:.1f}x"
    )
    say(out, said, *profile.remarks)
    rows = [{**row, "where": ", ".join(path or "model" for path in row["modules"])} for row in profile.table(share)]
    title = f"{len(rows)} of {len(profile.groups)} groups take {share:.0%} of the time inside ops"
    show(out, title, rows, HOT, below=("shapes", "phase", "where", "bound"), roomy=("calls",))
    if t.unknown:
        say(out, f"no formula for: {', '.join(t.unknown)}", style="yellow")


def show_advice(out: Console, profile: Profile) -> None:
    """What to change, by call site."""
    say(out, *map(advice_line, profile.advice))


def show_replay(out: Console, profile: Profile) -> None:
    """In the model, alone, and alone with shuffled indices; ratios are to the time in the model."""
    show(out, REPLAY, replay_rows(profile.replays), REPLAYS, below=("phase", "shapes"), roomy=("in model ms",))


def show_applied(out: Console, profile: Profile) -> None:
    """The realised gain beside the sum predicted."""
    done = profile.applied
    say(out, done["reason"])
    if done["applied"]:
        realised, predicted = (duration(done[key] / 1e3) for key in ("realised_ms", "predicted_ms"))
        say(out, f"realised gain {realised} a step, predicted {predicted}")

"""The page of stretto.profile, which answers why a model is slow."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from stretto.page.captions import told
from stretto.page.charts import BOUNDS, TOP, Bar, by_place, longest, on_roofline, short_op, threads
from stretto.page.frame import card, grid, items, numbers, page, table
from stretto.page.svg import COLOURS, bars
from stretto.page.text import duration, short
from stretto.profile.words import PLANS, REPLAY, REPLAYS, advice_line, plan_bars, plans_alike, replay_rows

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

TOP_PLANNED = 4  # layers whose plans are drawn
OPS = ("op", "ms", "share", "bound", "attainable", "phase", "shapes", "modules", "calls", "flops", "bytes", "dtypes",
       "strides")  # fmt: skip


def profile_page(profile: Profile) -> str:
    """The whole page."""
    trace, values = profile.trace, profile.to_dict()
    groups = values["groups"]
    facts = {
        "a step": duration(trace.step_seconds),
        "kernels": str(trace.launches),
        "attributed": f"{trace.attributed:.1%}",
        "inside ops": f"{trace.in_ops:.0%}",
        f"groups take {profile.share:.0%}": f"{len(profile.hot())} of {len(groups)}",
        "work": f"{short(float(trace.flops))}flop",
        "peak memory": f"{short(float(trace.peak_bytes))}B",
    }
    ops = [{**g, "modules": ", ".join(m or "model" for m in g["modules"])} for g in groups]
    parts = [
        numbers(facts),
        grid([*_pictures(profile, groups), *_gains(profile)]),
        card("Advice", _advice(profile)),
        told("Ops", table("ops", ops, OPS)),
        told(REPLAY, table("replays", replay_rows(profile.replays), REPLAYS)),
    ]
    subtitle = ". ".join([f"{values['mode']}; {profile.machine.name}, {threads(profile.machine)}", *profile.remarks])
    return page(f"Why is it slow? {profile.model}", subtitle, parts)


def _pictures(profile: Profile, groups: list[dict[str, Any]]) -> list[str]:
    timed = [{**g, "seconds": g["ms"] / 1e3} for g in groups]
    return [
        told("Roofline, measured", on_roofline(timed, profile.machine)),
        told("Time by op", bars(by_op(profile), "time by op", "ms", legend=BOUNDS)),
        told("Time by layer", bars(by_layer(profile), "time by layer", "ms")),
    ]


def by_op(profile: Profile) -> list[Bar]:
    """Milliseconds by op. Views are in no group."""
    rows = [(short_op(g.name, g.shapes), g.seconds * 1e3, COLOURS.get(g.bound, "c5")) for g in profile.groups]
    return longest(rows, profile.trace.step_seconds * 1e3, "views, and between the ops: Python, autograd")


def by_layer(profile: Profile) -> list[Bar]:
    """Milliseconds by layer inside ops. What lies between is told as one: a tracer makes it several times longer."""
    values = ((op.path or "outside layers", op.seconds * 1e3) for op in profile.trace)
    return by_place(values, profile.trace.step_seconds * 1e3, "between the ops: Python, autograd")


def _gains(profile: Profile) -> list[str]:
    """What the advice saves: by site, by plan, and in the step that took it."""
    pictures = []
    ordered = sorted(profile.advice, key=lambda row: -row["saves_ms"])
    saving = [row for row in ordered if row["saves_ms"] > 0]
    if saving:
        drawn = bars([(f"{r['site']}: {r['best']}", r["speedup"][0], "c2") for r in saving[:TOP]], "speed-up", "x")
        pictures.append(told("Speed-up by site", drawn + _more(len(saving) - TOP)))
    planned = [row for row in ordered if row.get("plans")]
    plans = plan_bars(planned[:TOP_PLANNED])
    if plans:
        drawn = bars(plans, "speed-up by plan", "x", legend=PLANS)
        drawn += _note(plans_alike(planned[:TOP_PLANNED])) + _more(len(planned) - TOP_PLANNED)
        pictures.append(told("Speed-up by plan, over stock", drawn))
    done = profile.applied
    if done.get("applied"):
        gain = [("predicted", done["predicted_ms"], "c5"), ("realised", done["realised_ms"], "c2")]
        pictures.append(told("Gain of the step", bars(gain, "gain", "ms")))
    return pictures


def _advice(profile: Profile) -> str:
    sentences = [f"{advice_line(row)}." for row in profile.advice]
    if profile.applied:
        sentences.append(f"{'Applied: ' if profile.applied['applied'] else ''}{profile.applied['reason']}.")
    return items(sentences) if sentences else "<p>call recommend() for advice</p>"


def _note(text: str) -> str:
    return f'<p class="dim caption">{escape(text)}</p>' if text else ""


def _more(count: int) -> str:
    return _note(f"{count} more, which save less, are in the advice." if count > 0 else "")

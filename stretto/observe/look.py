"""A step as the analysis sees it: from a probe, confirmed by a second one; from the data itself where that fails.

Where a model makes sizes of its own (a pooling that keeps half of the nodes, edges dropped at random, edges sorted out
by type), what a probe shows says nothing about the data. Two probes of different sizes tell such a model: what the
first foretells for the second is then not what the second does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stretto.errors import fail
from stretto.kernels import has_own_memory
from stretto.machine import facts
from stretto.observe.classify import classify
from stretto.observe.inputs import Inputs
from stretto.observe.layer import Layer
from stretto.observe.lift import PROBES, SYMBOLS, Sizes, difference, rescale, shrunk, usable
from stretto.observe.put_back import put_back, uncached
from stretto.observe.trace import Trace
from stretto.observe.workload import LabelError, Workload, labels_of

logger = logging.getLogger("stretto")

ROOM = 0.5  # share of this machine's memory that a step may be expected to take and still be tried


@dataclass(frozen=True)
class Look:
    """The trace at the sizes of the data, the same with symbols for sizes, and the layers."""

    trace: Trace
    symbolic: Trace | None  # None: the data itself was traced, and its sizes are numbers
    layers: list[Layer]
    lifted: bool  # from a probe, and a second one agreed
    plain: Trace  # the same ops as they were seen, on sizes that tell nodes from edges where they are of a probe
    edges: frozenset[int]  # the numbers of edges there
    remarks: tuple[str, ...] = ()


def look(workload: Workload, inputs: Inputs) -> Look:
    """What a step on the data does."""
    if not inputs.whole:
        return _data_itself(workload, inputs)
    if inputs.sizes.n == 1:  # a probe has more: the gradient of what they share is a sum there, and none here
        return _data_itself(workload, inputs, "There is one node")
    try:
        seen = _probed(workload, inputs.data)
    except LabelError:  # the data's, which a step on them would not get by either
        raise
    except Exception as error:  # whatever a model may raise on a graph that is not its own
        logger.warning("stretto: the model does not run on a probe (%s); the data itself is traced", error)
        return _data_itself(workload, inputs, f"The model does not run on a smaller graph ({type(error).__name__})")
    return _lifted(workload, inputs, *seen)


@dataclass(frozen=True)
class _Seen:
    """A step on a probe."""

    sizes: Sizes
    trace: Trace
    layers: list[Layer]


def _probed(workload: Workload, data: Any) -> tuple[_Seen, _Seen]:
    """The step on two probes."""
    model = workload.model
    if any(is_lazy(p) for p in model.parameters()):
        _on(workload, data, PROBES[0])
    widths = {size for p in model.parameters() for size in p.shape}
    if isinstance(getattr(data, "x", None), Tensor):
        widths.update(data.x.shape[1:])
    probes = usable(data, widths)
    if len(probes) < 2:
        fail(f"the model's widths {sorted(widths)} clash with the sizes of probes")
    return _on(workload, data, probes[0]), _on(workload, data, probes[1])


def _on(workload: Workload, data: Any, sizes: Sizes) -> _Seen:
    model, small = workload.model, shrunk(data, sizes)
    with uncached(model):
        trace = Workload(model, small, workload.mode, workload.step, labels_of(data)).trace()
        return _Seen(sizes, trace, classify(model, trace, sizes, small, data.num_nodes))


def _data_itself(workload: Workload, inputs: Inputs, why: str = "") -> Look:
    with put_back(workload.model):
        trace = workload.trace()
        layers = classify(workload.model, trace, inputs.sizes, inputs.data)
    edges = frozenset(inputs.sizes.edges - {0})
    return Look(trace, None, layers, False, trace, edges, (f"{why}: the data itself was traced",) if why else ())


def _lifted(workload: Workload, inputs: Inputs, first: _Seen, second: _Seen) -> Look:
    result = rescale(first.trace, first.sizes.table(inputs.sizes.numbers()))
    foretold = rescale(first.trace, first.sizes.table(second.sizes.numbers()))
    why, edges = difference(foretold, second.trace), frozenset(first.sizes.edges)
    if not why:
        symbolic = rescale(first.trace, first.sizes.table(SYMBOLS))
        return Look(result, symbolic, first.layers, True, first.trace, edges)
    need = max(result.peak_bytes, first.trace.peak_bytes * _growth(first.sizes, inputs.sizes))
    if need <= ROOM * memory_here(workload.device):
        return _data_itself(workload, inputs, f"Two probes do not agree ({why})")
    said = (
        f"Two probes do not agree ({why}), and a step on the data may take {need / 1e9:.3g} GB, which was not tried: "
        "work, memory and times are guesses from the smaller one, and may be far too low"
    )
    logger.warning("stretto: %s", said)
    return Look(result, None, first.layers, False, first.trace, edges, (said,))


def _growth(probe: Sizes, sizes: Sizes) -> float:
    """How many times as large as a probe the data are, in what is larger most."""
    pairs = ((sizes.n, probe.n), (sizes.m, probe.m), (sizes.e, probe.e), (sizes.t, probe.t), (sizes.g, probe.g))
    return max(mine / theirs for mine, theirs in pairs if theirs)


def memory_here(device: torch.device) -> float:
    """Bytes that a step may take on this machine."""
    if has_own_memory(device):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(facts.memory_bytes() or 8e9)

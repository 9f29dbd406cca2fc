"""Forms of parallelism (Besta and Hoefler, figures 6 to 9): which of them this model and graph offer, and how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from stretto.analyze.graph_stats import GraphStats
from stretto.analyze.layer import Layer


@dataclass(frozen=True)
class Form:
    """One form, whether it is there, and how many things could run at once by it.

    By this form alone a step has the depth max(D, W - w + w / degree), w being the work it is about; parallelism is W
    over that.
    """

    level: str
    form: str
    available: bool
    degree: int
    reason: str
    work: float = 0.0  # flops of the ops it is about
    depth: float = 0.0  # steps by this form alone
    parallelism: float = 1.0  # all work over that depth

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _distinct(data: Any, *names: str) -> int:
    """Different values of the first of these attributes that the data has."""
    values = next((v for v in (getattr(data, n, None) for n in names) if isinstance(v, Tensor) and v.numel()), None)
    return 1 if values is None else values.unique().numel()


def _mlp_depth(model: nn.Module, layers: list[Layer]) -> int:
    """Most Linear modules inside one layer."""
    modules = dict(model.named_modules())
    return max(
        (
            sum(type(m).__name__ == "Linear" for m in modules[layer.path].modules())
            for layer in layers
            if layer.path in modules
        ),
        default=0,
    )


def _experts(count: int) -> str:
    if count > 1:
        return f"{count} modules of one kind in a list, whose outputs a gate weighs"
    return "no gate that weighs several modules of one kind"


def _gated(model: nn.Module) -> int:
    """Most modules of one class that a module holds in a list beside a gate: experts."""
    counts = [
        len(child)
        for module in model.modules()
        if any("gate" in name or "router" in name for name, _ in module.named_children())
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len({type(m) for m in child}) == 1
    ]
    return max(counts, default=1)


WORK = ("all", "edges", "products", "aggregation", "layers")  # what a form may be about
# Form -> the work it is about, where that is not all of it.
ABOUT = {
    "graph partition, by edge": "edges",
    "graph partition, by edge feature": "edges",
    "graph structure parallelism": "aggregation",
    "micro-pipeline": "layers",
    "ANN-pipeline": "products",
    "ANN-model": "products",
    "type parallelism": "layers",
    "attribute parallelism": "edges",
    "mixture of experts": "products",
}


def taxonomy(
    model: nn.Module,
    stats: GraphStats,
    layers: list[Layer],
    data: Any,
    targets: int,
    loads: dict[str, float],
    depth: float,
) -> list[Form]:
    """Every form of the taxonomy. data: what the step runs on; targets: nodes with a loss; loads: flops by WORK; depth:
    steps of the whole step with all forms together."""
    return [_with_depth(form, loads, depth) for form in _forms(model, stats, layers, data, targets)]


def _with_depth(form: Form, loads: dict[str, float], depth: float) -> Form:
    whole, part = loads["all"], loads[ABOUT.get(form.form, "all")]
    alone = max(depth, whole - part + part / max(1, form.degree)) if form.available else whole
    return replace(form, work=part, depth=alone, parallelism=whole / alone if alone else 1.0)


def _forms(model: nn.Module, stats: GraphStats, layers: list[Layer], data: Any, targets: int) -> list[Form]:
    graphs = int(getattr(data, "num_graphs", 1) or 1)
    types = len(data.edge_types) if hasattr(data, "edge_types") else _distinct(data, "edge_type")
    times = _distinct(data, "edge_time", "t", "time")
    edge_attr = getattr(data, "edge_attr", None)
    attributes = edge_attr[0].numel() if isinstance(edge_attr, Tensor) and edge_attr.size(0) else 0
    levels = 1 + sum(".pool." in f"{type(m).__module__}." for m in model.modules())
    experts = _gated(model)
    n, m, d = stats.num_nodes, stats.num_edges, stats.max_degree
    width = max((max(layer.width_in, layer.width_out) for layer in layers), default=1)
    depth = sum(len(layer.rounds) for layer in layers)
    mlp = _mlp_depth(model, layers)
    stages = 3 if layers else 0
    return [
        Form("data", "graph partition, by vertex", n > 1, n, f"{n} vertices can be split; the halo decides how far"),
        Form("data", "graph partition, by edge", m > 1, m, f"{m} edges; partial sums must be merged"),
        Form("data", "graph partition, by vertex feature", width > 1, width, f"rows {width} wide, cut into columns"),
        Form(
            "data",
            "graph partition, by edge feature",
            attributes > 1,
            attributes,
            f"{attributes} value{'s' * (attributes != 1)} per edge in the data",
        ),
        Form(
            "data",
            "dependent mini-batch",
            targets > 1,
            targets,
            f"{targets} targets, linked: support vertices are shared",
        ),
        Form("data", "independent mini-batch", graphs > 1, graphs, f"{graphs} graph{'s' * (graphs != 1)} in the data"),
        Form("model", "feature parallelism", width > 1, width, f"rows of up to {width} values"),
        Form(
            "model", "graph structure parallelism", d > 1, d, f"a tree of depth log2 {d} over the largest neighbourhood"
        ),
        Form(
            "model",
            "micro-pipeline",
            bool(layers),
            stages,
            "graph op, neural op and non-linearity of a layer overlap by chunks",
        ),
        Form(
            "model",
            "macro-pipeline",
            depth > 1,
            depth,
            f"{depth} rounds of aggregation as stages; every stage needs the graph",
        ),
        Form("model", "ANN-pipeline", mlp > 2, mlp, f"{mlp} linear maps inside the widest layer"),
        Form(
            "model",
            "ANN-model",
            width >= 1024,
            width // 256,
            f"weights {width} wide" + ("" if width >= 1024 else ": too small to split"),
        ),
        Form("other", "type parallelism", types > 1, types, f"{types} edge type{'s' * (types != 1)}"),
        Form("other", "attribute parallelism", attributes > 1, attributes, "attributes of an edge, each on its own"),
        Form(
            "other",
            "snapshot parallelism",
            times > 1,
            times,
            f"{times} point{'s' * (times != 1)} in time in the data",
        ),
        Form(
            "other",
            "hierarchical parallelism",
            levels > 1,
            levels,
            f"{levels} size{'s' * (levels != 1)} of graph between the layers",
        ),
        Form("other", "mixture of experts", experts > 1, experts, _experts(experts)),
        Form("other", "hybrid", n > 1 and width > 1, n * width, "vertices and features at once"),
    ]

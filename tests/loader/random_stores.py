"""Random calls of Store: damaged in its files or in meta.json, or given other features."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from stretto.loader import NeighborLoader, Store
from tests.loader.random_arguments import Calls, a_graph, fan_outs, right


def store(calls: Calls) -> None:
    """A Store, damaged in its files or in meta.json, or given other features."""
    n, edge_index = a_graph(calls)
    given = Data(x=torch.rand(n, 4, generator=calls.torch), edge_index=edge_index, num_nodes=n)
    given.w = torch.rand(edge_index.size(1), generator=calls.torch)
    given.when = calls.integers(9, n)
    with tempfile.TemporaryDirectory() as folder:
        made = Store.create(Path(folder) / "s", given, features=calls.choose.choice(("as is", "fp16", "int8")))
        x = made.load().x
        if calls.choose.random() < 0.5:
            _damage(calls, made.folder)
            made = Store(made.folder, verify=False)
            x = None
        elif calls.choose.random() < 0.5:
            x = calls.spoil("features", calls.spoil("features", x))
            made = made.with_features(x)
        options: dict[str, Any] = {"batch_size": 16, "num_threads": 1}
        if calls.choose.random() < 0.3 and "when" in made.data:
            options["time_attr"] = "when"
        if calls.choose.random() < 0.3 and "w" in made.data:
            options["weight_attr"] = "w"
        for batch in NeighborLoader(made, fan_outs(calls), **options):
            if x is not None:
                right(torch.equal(batch.x.float(), x[batch.n_id].float()), "x")
        made.load()


def _damage(calls: Calls, folder: Path) -> None:
    choose = calls.choose
    files = sorted(folder.glob("*.bin"))
    for _ in range(choose.randrange(1, 4)):
        kind, file = choose.choice(("flip", "cut", "grow", "field", "swap", "rows")), choose.choice(files)
        calls.said.append(f"{kind} {file.name}")
        content = bytearray(file.read_bytes())
        if kind == "flip" and content:
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        elif kind == "cut":
            content = content[: choose.randrange(len(content) + 1)]
        elif kind == "grow":
            content += bytes(choose.randrange(9000))
        elif kind == "swap":
            shutil.copy(choose.choice(files), file)
            continue
        elif kind == "field":
            _edit_field(calls, folder / "meta.json")
            continue
        elif kind == "rows":
            meta = json.loads((folder / "meta.json").read_text())
            for entry in meta["arrays"]:
                if entry["file"] == file.name and entry["shape"][0]:
                    size, rows = entry["bytes"] // entry["shape"][0], choose.choice((0, 1, 3, 50, 4000))
                    entry["shape"][0], entry["bytes"] = rows, rows * size
                    content = (content + bytes(rows * size))[: rows * size]
            (folder / "meta.json").write_text(json.dumps(meta))
        file.write_bytes(bytes(content))


def _edit_field(calls: Calls, path: Path) -> None:
    """Another value in some place of meta.json."""
    meta = json.loads(path.read_text())
    held: Any = meta
    while True:
        key = calls.choose.choice(sorted(held) if isinstance(held, dict) else range(len(held)))
        if not isinstance(held[key], (dict, list)) or not held[key] or calls.choose.random() < 0.1:
            break
        held = held[key]
    values = (
        -1,
        0,
        3,
        2**62,
        2**70,
        1.5,
        None,
        True,
        "",
        "x",
        "../x",
        "/etc/passwd",
        "int64",
        "int8",
        [],
        {},
        [1],
        ["a"],
    )
    held[key] = calls.choose.choice(values)
    calls.said.append(f"{key} = {held[key]!r}")
    path.write_text(json.dumps(meta))

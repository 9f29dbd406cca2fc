"""What a user may get wrong is answered in one sentence that names it: files, functions, numbers, folders."""

import json
import pickle
import sys

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from typer.testing import CliRunner

import stretto.analyze
import stretto.profile
from stretto import StrettoError, datasets
from stretto.analyze import Machine
from stretto.cli import app
from stretto.observe.models import as_data, make
from stretto.observe.subject import subject

FILES = {
    "no JSON": ("{bad", "is not JSON"),
    "a list": ("[1]", "is list, wanted names and values"),
    "words for a number": ('{"memory": "lots"}', "'memory' is 'lots', wanted a finite number above 0"),
    "no point": ('{"gather": []}', "'gather' is empty"),
    "a rate of 0": ('{"stream": [[1e5, 0]]}', "'stream' has .*, wanted 1 sizes and then rates above 0"),
    "a rate missing": ('{"gemm": [[1e6, 64]]}', "'gemm' has"),
    "a point of words": ('{"stream": ["fast"]}', "'stream' has 'fast'"),
    "no list": ('{"stream": 3}', "'stream' is 3, wanted points"),
    "no bandwidth": ('{"link_bandwidth": 0}', "'link_bandwidth' is 0"),
    "a number for a word": ('{"name": 3}', "'name' is 3, wanted a str"),
    "more than all": ('{"hidden": 1.5}', "'hidden' is 1.5, wanted a share, 0 to 1"),
    "less than none": ('{"hidden": -1}', "'hidden' is -1, wanted a finite number of at least 0"),
    "another device": ('{"device": "tpu"}', "'device' is 'tpu', wanted one of cpu, cuda"),
    "another link": ('{"link": "x"}', "'link' is 'x', wanted one of assumed, measured, given"),
    "a share of 2": ('{"cache": [[1e6, 2]]}', "'cache' has .*, wanted a size and then a share, 0 to 1"),
    "half a worker": ('{"workers": 1.5}', "'workers' is 1.5, wanted a whole number"),
    "not a number": ('{"sort": NaN}', "'sort' is nan"),
    "a type without rate": ('{"peak_gemm": {"float32": 0}}', "'peak_gemm' is"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_machine_file_is_refused_in_words(name, tmp_path):
    text, words = FILES[name]
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(StrettoError, match=f"machine file 'machine.json'.*{words}"):
        Machine.load(path)


def test_a_machine_file_that_was_written_is_read(tmp_path):
    Machine(name="mine", workers=4, peak_gemm={"float32": 1e10}).save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json").workers == 4
    (tmp_path / "part.json").write_text(json.dumps({"link_latency": 0, "peak_stream": []}))
    assert Machine.load(tmp_path / "part.json").link_latency == 0


@pytest.mark.parametrize("procs", [4, "1,2", [], [0], [1.5], [True], None], ids=repr)
def test_numbers_of_workers(procs):
    data = as_data(datasets.load_graph("er:20:40"), width=4)
    with pytest.raises(StrettoError, match=r"'procs' is .*, wanted a list of numbers from 1"):
        stretto.analyze(make("gcn", 4, 4, 8), data, machine=Machine(), procs=procs)


@pytest.mark.parametrize("procs", ["²", "1,,2", "0", "-1", "two"])
def test_words_for_numbers_of_workers(procs):
    result = CliRunner().invoke(app, ["analyze", "gcn", "--procs", procs])
    assert f"'--procs' is {procs!r}, wanted numbers from 1" in str(result.exception)


@pytest.mark.parametrize(
    "field", [{"hidden": 2.0}, {"memory": -1.0}, {"link_bandwidth": 0.0}, {"memory": float("inf")}], ids=repr
)
def test_a_machine_is_checked_as_its_file_is(field):
    (name,) = field
    with pytest.raises(StrettoError, match=f"analyze: 'machine': '{name}' is "):
        stretto.analyze(
            make("gcn", 4, 4, 8), as_data(datasets.load_graph("er:20:40"), width=4), machine=Machine(**field)
        )


def test_numbers_of_numpy_are_numbers():
    machine = Machine(workers=np.int64(4), memory=np.float32(4e9))
    data = as_data(datasets.load_graph("er:20:40"), width=4)
    assert stretto.analyze(make("gcn", 4, 4, 8), data, machine=machine).best.fits


def test_more_workers_than_nodes_and_one_number_twice():
    data = as_data(datasets.load_graph("er:20:40"), width=4)
    report = stretto.analyze(make("gcn", 4, 4, 8), data, machine=Machine(), procs=[1, 30000, 1, 30000])
    assert [part.parts for part in report.partitions] == [1, 30000]
    many = report.partitions[1]
    assert (len(many.rows), sum(many.rows)) == (30000, 20)
    assert sum(many.halo) == sum(many.push) == many.cut == many.pairs  # every node has a part of its own


@pytest.mark.parametrize("machine", [3, None, ["auto"]], ids=repr)
def test_what_is_no_machine(machine):
    with pytest.raises(StrettoError, match=r"'machine' is .*, wanted .auto., a machine file or a Machine"):
        stretto.analyze(make("gcn", 4, 4, 8), as_data(datasets.load_graph("er:20:40"), width=4), machine=machine)


def test_numbers_and_functions_of_calls():
    data = as_data(datasets.load_graph("er:20:40"), width=4)
    model = make("gcn", 4, 4, 8)
    report = stretto.analyze(model, data, machine=Machine(), procs=[1])
    for wrong, words in (
        ({"repeats": 0}, "'repeats' is 0"),
        ({"workers": -1}, "'workers' is -1"),
        ({"workers": "2"}, "'workers' is '2'"),
    ):
        with pytest.raises(StrettoError, match=words):
            report.validate(**wrong)
    for wrong, words in (({"step": 3}, "'step' is 3, wanted a function"), ({"mode": "eval"}, "'mode' is 'eval'")):
        with pytest.raises(StrettoError, match=f"profile: {words}"):
            stretto.profile(model, data, machine=Machine(), **wrong)
    with pytest.raises(StrettoError, match="profile: 'model' is str, wanted a Module"):
        stretto.profile("gcn", data, machine=Machine())
    with pytest.raises(StrettoError, match="'repeats' is 'a'"):
        stretto.profile(model, data, machine=Machine(), repeats="a")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", "returned a int"),
        ("return torch.nn.Linear(2, 2)", "returned a Linear, wanted a model and its data"),
        ("return 1, 2", r"returned \(int, int\)"),
        ("return torch.nn.Linear(2, 2), 1, 2", r"returned \(Linear, int, int\)"),
    ],
)
def test_a_function_that_returns_something_else(body, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n\n\ndef build():\n    {body}\n")
    with pytest.raises(StrettoError, match=words):
        subject(f"{path}:build", "", 8, 2)


OWN = """
import torch
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from beside import WIDTH


class Own(MessagePassing):
    def __init__(self):
        super().__init__(aggr="max")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j.relu()


def build():
    import beside

    return Own(), Data(x=torch.randn(20, beside.WIDTH), edge_index=torch.randint(20, (2, 60)))
"""


def made_from(folder):
    """Names of the modules whose files lie there."""
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file.startswith(str(folder))]


@pytest.mark.parametrize("name", ["mine_own", "torch", "my-own"])
def test_a_file_has_layers_of_its_own_and_imports_what_lies_beside_it(name, tmp_path, monkeypatch, request):
    monkeypatch.setattr(sys, "path", [*sys.path])
    request.addfinalizer(lambda: [sys.modules.pop(mine) for mine in made_from(tmp_path)])
    (tmp_path / "beside.py").write_text("WIDTH = 16\n")
    path = tmp_path / f"{name}.py"
    path.write_text(OWN)
    model, data = subject(f"{path}:build", "", 8, 2)
    assert stretto.analyze(model, data, machine=Machine(), procs=[1]).layers
    if name == "mine_own":
        assert type(pickle.loads(pickle.dumps(model))) is type(model)
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize("option", ["--hidden", "--layers"])
def test_a_model_of_nothing(option):
    finished = CliRunner().invoke(app, ["analyze", "gcn", "--graph", "er:20:40", option, "0"])
    assert finished.exit_code != 0
    assert f"'{option}' is 0, wanted 1 or more" in str(finished.exception or "") + finished.output


@pytest.mark.parametrize("option", ["--html", "--json", "--save-machine"])
def test_a_folder_that_is_not_there_is_told_before_the_work(option, tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.cli.analyze.subject", lambda *args: pytest.fail("the work has begun"))
    place = str(tmp_path / "nowhere" / "out")
    finished = CliRunner().invoke(app, ["analyze", "gcn", option, place])
    assert finished.exit_code != 0
    assert "there is no folder" in str(finished.exception or "") + finished.output


def test_labels_without_a_column_are_named():
    data = as_data(datasets.load_graph("er:40:120"), width=8)
    data.y = torch.zeros(40, dtype=torch.long)
    data.y[3] = 9
    data.train_mask = torch.ones(40, dtype=torch.bool)
    words = "'y' has labels from 0 to 9, but the model's output has 5 columns"
    with pytest.raises(StrettoError, match=words):
        stretto.analyze(make("gcn", 8, 16, 5), data, machine=Machine(), procs=[1])


X, EDGES = torch.randn(20, 8), torch.randint(20, (2, 60))


def test_arguments_of_forward_by_name():
    model, given = make("gcn", 8, 8, 4), {"x": X, "edge_index": EDGES}
    profile = stretto.profile(model, given, machine=Machine(), repeats=1)
    assert profile.trace.launches == stretto.profile(model, (X, EDGES), machine=Machine(), repeats=1).trace.launches
    assert [row["site"] for row in profile.recommend(repeats=1)] == ["convs.0", "convs.1"]
    assert stretto.analyze(model, given, machine=Machine(), procs=[1]).graph.num_edges == 60


class TakesADict(torch.nn.Module):
    """Forward has one argument, which is a dict."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 2)

    def forward(self, batch):
        return self.lin(batch["x"])


def test_a_dict_may_be_the_argument_itself():
    assert stretto.profile(TakesADict(), {"x": X}, machine=Machine(), repeats=1).trace.flops > 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": X}, "a dict of x, wanted what forward of Stack takes by name: x, edge_index"),
        ({"x": X, "edge_index": EDGES, "other": 1}, "a dict of x, edge_index, other, wanted"),
        ((), "a tuple of 0, wanted what forward of Stack takes: x, edge_index"),
        ((X, EDGES, X), "a tuple of 3, wanted"),
        (Data(edge_index=EDGES), "forward of Stack wants 'x', which the data does not have"),
        (Data(x=X, edge_index=EDGES, y=torch.arange(20)), "'y' has labels from 0 to 19"),
    ],
    ids=["too few", "unknown", "nothing", "too many", "no x", "labels"],
)
def test_data_that_forward_does_not_take(data, said):
    """The error is told by what was called."""
    with pytest.raises(StrettoError, match=f"^profile: .*{said}"):
        stretto.profile(make("gcn", 8, 8, 4), data, machine=Machine(), repeats=1)


def test_a_share_is_a_number():
    profile = stretto.profile(make("gcn", 8, 8, 4), (X, EDGES), machine=Machine(), repeats=1)
    for wrong in ("a", 0, 2.0):
        with pytest.raises(StrettoError, match=r"hot: 'share' is .*, wanted a number, 0 < share <= 1"):
            profile.hot(wrong)
    profile.share = 0.5
    assert len(profile.hot()) == len(profile.hot(0.5)) == profile.to_dict()["hot"] < len(profile.hot(0.9))
    assert profile.to_dict()["hot_share"] == 0.5


@pytest.mark.parametrize("label", [9, -3])
def test_labels_beyond_the_rows_of_a_probe_are_looked_at(label):
    data = as_data(datasets.load_graph("er:400:1200"), width=8)
    data.y = torch.arange(400) % 5
    data.y[390], data.y[391] = label, -1  # of which the last is none
    words = f"'y' has labels from {min(0, label)} to {max(4, label)}, but the model's output has 5 columns"
    with pytest.raises(StrettoError, match=words):
        stretto.analyze(make("gcn", 8, 16, 5), data, machine=Machine(), procs=[1])
    for other in ({"mode": "infer"}, {"step": lambda model, data: model(data.x, data.edge_index).sum()}):
        assert stretto.analyze(make("gcn", 8, 16, 5), data, machine=Machine(), procs=[1], **other).lifted
    data.train_mask = torch.arange(400) < 300  # no loss is taken of them
    assert stretto.analyze(make("gcn", 8, 16, 5), data, machine=Machine(), procs=[1]).lifted

"""The command line: the table of commands, its help, its errors, and the two doors of `python -m stretto`."""

import copy
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stretto
from stretto import cli
from stretto.errors import StrettoError
from stretto.ops import OPS

runner = CliRunner()
ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, cwd=None, **env):
    """`python ARGUMENTS` in a process of its own, on one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=250, cwd=cwd, env=env)


@pytest.mark.parametrize("target", [*cli.COMMANDS.values(), *cli.BENCHES.values()])
def test_every_line_of_the_table_leads_to_a_documented_function(target):
    module, function = target.split(":")
    assert getattr(importlib.import_module(module), function).__doc__


@pytest.mark.parametrize(
    "words", [[], *[[name] for name in cli.COMMANDS], ["bench"], *[["bench", n] for n in cli.BENCHES]]
)
def test_help(words):
    result = runner.invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_names_every_command():
    output = runner.invoke(cli.app, ["--help"]).output
    assert all(name in output for name in (*cli.COMMANDS, "bench"))


def test_unknown_command():
    result = runner.invoke(cli.app, ["levitate"])
    assert result.exit_code == 2
    assert "levitate" in result.output


def test_doctor_json():
    torch.set_num_threads(1)
    result = runner.invoke(cli.app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 0
    assert found["versions"]["stretto"] == stretto.__version__
    assert found["isa"]["chosen"] in (*found["isa"]["available"], "none")
    assert found["library"]["loaded"] == (found["library"]["why_not"] == "")
    smoke = found["smoke_test"]
    assert smoke["ok"]
    assert smoke["error"] <= smoke["allowed"]
    assert f"calls of {len(OPS)} ops" in smoke["what"]
    assert smoke["ms"] > 0
    assert smoke["stock_ms"] > 0


def test_the_doctor_finds_a_wrong_op(monkeypatch):
    from stretto.cli import doctor

    softmax = OPS["edge_softmax"]
    wrong = copy.copy(softmax)  # dataclasses.replace() would declare the op a second time
    object.__setattr__(wrong, "function", lambda *args, **kwargs: 1.01 * softmax.function(*args, **kwargs))
    monkeypatch.setitem(doctor.OPS, "edge_softmax", wrong)
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "FAILED: edge_softmax" in result.output


@pytest.mark.parametrize("name", cli.BENCHES)
def test_suites_are_not_installed(monkeypatch, tmp_path, name):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "stretto" / "cli" / "__init__.py"))
    result = runner.invoke(cli.app, ["bench", name])
    assert isinstance(result.exception, StrettoError)
    assert "the suites are in the source tree alone: run `python -m stretto bench`" in str(result.exception)


def test_doctor_text_says_why_the_library_is_off(tmp_path):
    result = python("-m", "stretto", "doctor", STRETTO_NATIVE="0", STRETTO_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    lines = {line[:11].strip(): line[12:] for line in result.stdout.splitlines()}
    assert lines["library"] == "not loaded: STRETTO_NATIVE=0"
    assert "STRETTO_NATIVE=0" in lines["settings"]
    assert "not made yet, writable" in lines["cache"]
    assert lines["smoke test"].startswith("ok: ")
    assert "ops on rmat:8:1500, forward and backward: error" in lines["smoke test"]
    assert "plain PyTorch" in lines["smoke test"]


def test_demo_reaches_the_same_accuracy_twice():
    from stretto.cli import demo

    torch.set_num_threads(1)
    runs = demo.train(epochs=40, seed=0, after=lambda word: None)
    stock, ours = (run.accuracy() for run in runs.values())
    assert ours > 0.7
    assert abs(stock - ours) <= 0.005


def test_demo_command():
    result = runner.invoke(cli.app, ["demo", "--epochs", "2", "--graph", "rmat:8:500", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert "stock PyG" in result.output
    assert "2 of 2 layers ran fast" in result.output
    for model in ("gcn", "sage", "gat"):
        assert f"│ {model} " in result.output
    assert "raises" not in result.output


def test_errors_are_one_line():
    result = python("-m", "stretto", "bench", "ops", "--op", "spmm", "--graph", "nosuchgraph")
    assert result.returncode == 2
    assert result.stderr.startswith("stretto: load: no graph 'nosuchgraph'")
    assert "Traceback" not in result.stderr


def test_module_without_a_script_is_the_command_line():
    result = python("-m", "stretto", "--help")
    assert result.returncode == 0
    assert "doctor" in result.stdout


def test_missing_script():
    result = python("-m", "stretto", "nowhere.py")
    assert result.returncode == 1
    assert result.stderr.strip() == "stretto: no script 'nowhere.py'"


def test_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "helper.py").write_text("word = 'found'\n")
    (tmp_path / "script.py").write_text(
        "import sys, helper\nassert __name__ == '__main__'\nprint(sys.argv[1:], helper.word)\n"
    )
    result = python("-m", "stretto", str(tmp_path / "script.py"), "--flag", "7")
    if importlib.util.find_spec("stretto.plug.accelerate") is None:
        assert result.stderr.strip() == "stretto: this build has no plug-in to run a script with"
        assert result.returncode == 1
    else:
        assert result.stdout.strip().endswith("['--flag', '7'] found")
        assert result.returncode == 0


def test_script_may_fail_with_its_own_error(tmp_path):
    if importlib.util.find_spec("stretto.plug.accelerate") is None:
        pytest.skip("no plug-in yet: scripts are refused")
    (tmp_path / "script.py").write_text("raise KeyError('mine')\n")
    result = python("-m", "stretto", str(tmp_path / "script.py"))
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stderr


# PyG's own pattern of training on several processes; nothing of it knows stretto.
DDP = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GCNConv

def run(rank, world_size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(GCNConv(6, 3))
    model(torch.randn(30, 6) + rank, torch.randint(30, (2, 140))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    stretto = sys.modules.get("stretto")
    path = stretto.report(model.module).rows[0].path if stretto else "stock"
    sys.stdout.write(f"rank {rank} {path} {__name__} {sys.argv[1:]} {grads.sum():.4f}\\n")
    sys.stdout.flush()
    del model  # where it outlives the group, torch may hang: it then joins the group's threads with the GIL held
    dist.destroy_process_group()

if __name__ == "__main__":
    assert "stretto" in sys.modules
    mp.spawn(run, args=(2, int(sys.argv[1])), nprocs=2)
"""


def test_processes_that_a_script_starts_are_patched(tmp_path):
    script = tmp_path / "train"  # a script need not end in .py
    script.write_text(DDP)
    port = str(20000 + os.getpid() % 20000)
    result = python("-m", "stretto", str(script), port, cwd=ROOT, STRETTO_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.strip().splitlines())
    name = "__mp_main__"
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"rank {r} fast {name} ['{port}']" for r in range(2)]
    assert len({line.rsplit(" ", 1)[1] for line in lines}) == 1


def test_a_process_started_by_a_started_process_is_patched(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, multiprocessing\n"
        "spawn = multiprocessing.get_context('spawn')\n"
        "def work(depth):\n"
        "    print(depth, sys.modules['stretto'].is_patched(), flush=True)\n"
        "    if depth < 2:\n"
        "        child = spawn.Process(target=work, args=(depth + 1,))\n"
        "        child.start(), child.join()\n"
        "if __name__ == '__main__':\n"
        "    work(0)\n"
    )
    result = python("-m", "stretto", str(script), cwd=ROOT)
    assert result.stdout.split("\n") == ["0 True", "1 True", "2 True", ""], result.stderr


def test_a_command_goes_before_a_file_of_its_name(tmp_path):
    (tmp_path / "doctor").write_text("print('the file')\n")
    where = {"PYTHONPATH": str(ROOT), "STRETTO_CACHE": str(tmp_path / "cache")}
    result = python("-m", "stretto", "doctor", "--help", cwd=tmp_path, **where)
    assert "the file" not in result.stdout
    assert "Usage" in result.stdout


def test_the_library_does_not_need_the_command_line():
    given = "import sys, torch, torch_geometric; before = set(sys.modules); import stretto"  # theirs is not ours
    code = f"{given}; assert not {{'typer', 'rich', 'click'}} & (set(sys.modules) - before), 'imported'"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_wrong_option_values():
    result = runner.invoke(cli.app, ["bench", "ops", "--op", "spmm", "--graph", "star:5", "--dtype", "f128"])
    assert isinstance(result.exception, StrettoError)
    assert "'--dtype' is 'f128', wanted one of f32" in str(result.exception)


def test_the_ops_example_runs():
    example = Path(__file__).parents[2] / "examples" / "ops.py"
    result = python(str(example))
    assert result.returncode == 0, result.stderr
    assert "attention [2708, 4, 8]" in result.stdout

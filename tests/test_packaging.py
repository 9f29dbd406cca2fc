"""What is shipped: objects that share no symbol between instruction sets, a wheel for any Python, a wheel without a
compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ISAS = ("baseline", "avx2", "avx512")


def _symbols(*folders: Path) -> dict[str, str]:
    """Symbols defined in the objects under some folders, and their kind: T, W, V, u, ..."""
    objects = sorted(o for folder in folders for o in folder.rglob("*.o"))
    listed = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return {parts[-1]: parts[-2] for parts in lines if len(parts) == 3}


def test_instruction_sets_share_no_symbol():
    """The linker keeps one copy of a symbol that several objects define: code for one CPU must not run on another."""
    folders = {isa: list((ROOT / "build" / "CMakeFiles").glob(f"kernels_{isa}*.dir")) for isa in ISAS}
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    if not all(folders.values()):
        pytest.skip("no objects under build/: nothing was compiled here, or for other instruction sets")
    symbols = {isa: _symbols(*every) for isa, every in folders.items()}
    core = _symbols(ROOT / "build" / "CMakeFiles" / "stretto.dir")
    for isa, own in symbols.items():
        mergeable = {name for name, kind in own.items() if kind in "WVuT" and not name.startswith("DW.ref.")}
        assert mergeable, f"{isa}: no symbols found"
        for name in mergeable:
            assert f"{len(isa)}{isa}" in name, f"{isa}: {name} is outside its namespace"
        others = set(core).union(*(s for other, s in symbols.items() if other != isa))
        assert not mergeable & others


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The tracked files as they are, in a folder of their own."""
    folder = tmp_path_factory.mktemp("checkout")
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build_wheel(checkout: Path, into: Path, **environment: str) -> Path:
    """pip wheel --no-deps, in a build environment of its own."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(into), str(checkout)]
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if finished.returncode and re.search(
        "No matching distribution|Could not find a version|Connection", finished.stderr
    ):
        pytest.skip("the build requirements cannot be had: no network and no local copy")
    assert finished.returncode == 0, finished.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


def install_and_run(wheel: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A fresh environment with this wheel alone; torch and the rest come from the one that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    finished = run_installed(folder, "-c", code)
    assert finished.returncode == 0, finished.stderr
    return finished


def run_installed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in that environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STRETTO_")}
    environment |= {"PYTHONPATH": sysconfig.get_paths()["purelib"], "STRETTO_CACHE": str(folder / "cache")}
    command = [folder / "venv" / "bin" / "python", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


SMOKE = """
import torch, stretto
from stretto.kernels import native
x = torch.randn(4, 3, requires_grad=True)
out = stretto.ops.spmm(stretto.Graph.of(torch.tensor([[0, 1, 2], [1, 2, 2]]), 4), x, reduce="mean")
out.sum().backward()
expected = torch.stack([x[0] * 0, x[0], (x[1] + x[2]) / 2, x[0] * 0])
assert torch.allclose(out, expected), out
print(native.isa(), native.location(), stretto.__file__, sep="|")
"""

LIGHT = "import sys; sys.modules.update(typer=None, rich=None); import stretto"
COMMANDS = (
    "doctor",
    "demo --epochs 2 --graph rmat:8:500 --repeats 1",
    "tune --graph rmat:8:1500 --width 16",
    "train --epochs 1 --fanout 5,5 --hidden 16",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel(checkout, tmp_path):
    """One wheel for every Python and torch; what it holds is the package and the library."""
    wheel = build_wheel(checkout, tmp_path / "wheel")
    assert re.fullmatch(r"stretto-[\d.]+-py3-none-(linux|macosx|win).*\.whl", wheel.name)
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert wheel.name.endswith("py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"stretto/lib/libstretto\.(so|dylib)", n) for n in names)
    assert "stretto/datasets/cora.npz" in names
    assert not [n for n in names if n.split("/")[0] in ("csrc", "tests", "benchmarks", "examples", "build")]
    assert not [n for n in names if "bench" in n]
    finished = install_and_run(wheel, tmp_path, SMOKE)
    isa, library, module = finished.stdout.strip().split("|")
    assert isa in ISAS
    assert str(tmp_path) in library
    assert str(tmp_path) in module
    assert "native kernels are off" not in finished.stderr
    light = run_installed(tmp_path, "-W", "error", "-c", LIGHT)
    assert light.returncode == 0, light.stderr
    for words in COMMANDS:
        finished = run_installed(tmp_path, "-m", "stretto", *words.split())
        assert finished.returncode == 0, finished.stderr
    finished = run_installed(tmp_path, "-m", "stretto", "bench", "models")
    assert finished.returncode == 2
    assert finished.stderr.startswith("stretto: bench: the suites are in the source tree alone")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_compiler(checkout, tmp_path):
    """The install still works; the reference runs instead, and one line says why."""
    wheel = build_wheel(checkout, tmp_path / "wheel", CXX="/bin/false", CC="/bin/false")
    assert wheel.name.endswith("py3-none-any.whl")
    finished = install_and_run(wheel, tmp_path, SMOKE)
    assert finished.stdout.startswith("none||")
    lines = [line for line in finished.stderr.splitlines() if "stretto" in line]
    assert len(lines) == 1, finished.stderr
    assert "native kernels are off, plain PyTorch runs instead: no libstretto" in lines[0]

"""The house: import layers, file sizes, docstrings, explicit tables. Kept by this test, not by goodwill."""

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from stretto.kernels import schema
from stretto.ops import KERNELS, OPS
from stretto.settings import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stretto"
# A module imports only from lower rows, or from its own as long as no circle closes. docs/all_of_stretto.md draws this.
LAYERS = (
    ("errors", "settings", "datasets", "files", "lifetime", "recording"),
    ("memory",),
    ("kernels",),
    ("machine",),
    ("graph",),
    ("ops",),
    ("compile",),
    ("layers", "dist", "loader"),
    ("plug",),
    ("observe",),
    ("profile", "analyze", "page"),
    ("__main__", "cli"),
)
ROW = {unit: row for row, units in enumerate(LAYERS) for unit in units}
PYG_FROM, PYG_TOO = ROW["layers"], ("loader",)  # torch_geometric is imported from this row on, and in these
MOST_LINES = 400

sources = sorted(PACKAGE.rglob("*.py"))
everywhere = sorted(p for d in ("stretto", "tests", "examples", "benchmarks") for p in (ROOT / d).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def unit_of(module: str) -> str:
    """stretto.graph.memo -> graph; stretto.kernels.cpu -> kernels; stretto itself -> nothing."""
    return module.split(".")[1] if "." in module else ""


def command(path: Path) -> bool:
    """Whether it is part of the command line: the last row, and what the row below prints and asks on a terminal."""
    row = ROW.get(unit_of(module_of(path)), 0)
    return row == len(LAYERS) - 1 or (row == len(LAYERS) - 2 and path.name == "terminal.py")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, at_load: bool = False) -> set[str]:
    """Every module the file imports, wherever the import stands; at_load: only those that loading it runs."""
    tree = ast.parse(path.read_text())
    nodes = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))] if at_load else list(ast.walk(tree))
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name for name in inside if name in MODULES} or {base}
            if any(name not in MODULES for name in inside):
                found.add(base)
    return found


MODULES = {module_of(p): p for p in sources}


def test_every_module_has_a_row():
    units = {unit_of(module_of(p)) for p in sources} - {""}
    assert units <= set(ROW), f"give these a row in LAYERS: {sorted(units - set(ROW))}"


@pytest.mark.parametrize("path", [p for p in sources if unit_of(module_of(p))], ids=name_of)
def test_imports_go_down(path):
    unit = unit_of(module_of(path))
    for module in imports_of(path):
        if module.split(".")[0] != "stretto":
            continue
        other = unit_of(module)
        if other in ROW and other != unit:
            assert ROW[other] <= ROW[unit], f"{name_of(path)} (row {ROW[unit]}) imports {module} (row {ROW[other]})"


def reached_from(start: str, edges: dict[str, set[str]]) -> set[str]:
    """All that is imported, directly or through others."""
    reached, frontier = set(), [start]
    while frontier:
        for after in edges[frontier.pop()] - reached:
            reached.add(after)
            frontier.append(after)
    return reached


def test_loading_closes_no_circle():
    """Also within a row: whoever is imported first must not need whoever imports it."""
    edges = {m: {o for o in imports_of(p, at_load=True) if o in MODULES and o != m} for m, p in MODULES.items()}
    edges["stretto"] = set()  # the public names: imported by users, not by modules
    for start in edges:
        reached = reached_from(start, edges)
        assert start not in reached, f"{start} imports itself through some of {sorted(reached)}"


def uses() -> dict[str, set[str]]:
    """Package -> the packages it imports anything of, wherever the import stands, for types alone too."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        others = {unit_of(m) for m in imports_of(path) if m.split(".")[0] == "stretto"}
        edges.setdefault(unit_of(module), set()).update(others - {unit_of(module), ""})
    return edges


def test_packages_use_one_another_in_one_direction():
    edges = uses() | {"": set()}  # stretto itself: the public names
    for unit in edges:
        others = reached_from(unit, edges)
        assert unit not in others, f"{unit} uses itself through some of {sorted(others)}"


@pytest.mark.parametrize("package", ["machine", "observe", "page"])
def test_others_import_what_a_package_names(package):
    """Each of them says in its __init__ what others may use; the rest is its own."""
    public = {f"stretto.{package}.{name}" for name in importlib.import_module(f"stretto.{package}").PUBLIC}
    assert public <= set(MODULES)
    for module, path in MODULES.items():
        if unit_of(module) != package:
            private = {m for m in imports_of(path) if m.startswith(f"stretto.{package}.")} - public
            assert not private, f"{name_of(path)} imports {sorted(private)}"


def test_two_questions_two_packages():
    """Why is it slow, and would more hardware help, share what they observe, not what they say."""
    edges = uses()
    assert "analyze" not in edges["profile"]
    assert "profile" not in edges["analyze"]
    assert not edges["page"] & {"profile", "analyze", "observe"}


# A card itself is measured, filled or said to be missing there; everybody else asks a Backend or kernels/device.py.
KNOW_DEVICES = ("kernels", "memory", "machine")


@pytest.mark.parametrize("path", [p for p in sources if unit_of(module_of(p)) not in KNOW_DEVICES], ids=name_of)
def test_the_kind_of_a_device_is_asked_of_kernels(path):
    assert not re.findall(r"\.is_cuda|\bdevice\.type\b", path.read_text())


def test_the_package_does_without_the_suites():
    """A wheel does not hold them: the command line finds them by name, in the source tree."""
    assert not [name_of(p) for p in sources if any(m.split(".")[0] == "benchmarks" for m in imports_of(p))]


@pytest.mark.parametrize("path", sources, ids=name_of)
def test_heavy_imports_stay_where_they_belong(path):
    roots = {module.split(".")[0] for module in imports_of(path)}
    at_load = {module.split(".")[0] for module in imports_of(path, at_load=True)}
    unit = unit_of(module_of(path))
    if "torch_geometric" in roots and unit:
        assert ROW[unit] >= PYG_FROM or unit in PYG_TOO, "torch_geometric is not imported this far down"
    if "triton" in roots:
        assert path.is_relative_to(PACKAGE / "kernels" / "triton"), "triton is imported only in kernels/triton"
    if {"typer", "rich"} & at_load:
        assert command(path), "the command line alone needs typer and rich"


@pytest.mark.parametrize("path", everywhere, ids=name_of)
def test_a_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MOST_LINES, f"{lines} lines: it holds two ideas"
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module starts with a docstring"


@pytest.mark.parametrize("path", [p for p in sources if p != PACKAGE / "cli" / "__init__.py"], ids=name_of)
def test_nothing_prints(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]


@pytest.mark.parametrize("path", sources, ids=name_of)
def test_no_error_is_swallowed_and_nothing_is_left_for_later(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            if isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"):
                assert not isinstance(node.body[0], ast.Pass), f"line {node.lineno}: whatever happens is swallowed"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text())


# What reads pickles: files that this package wrote itself a moment ago, and those that the user says they trust.
MAY_UNPICKLE = {"stretto/machine/ranks.py": 3, "stretto/cli/convert.py": 1}


def test_nothing_unpickles_what_it_did_not_write():
    found: dict[str, int] = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, words = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name == "torch.load":
                bad = words.get("weights_only") != "True"
            else:
                bad = name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "shelve.open")
                bad = bad or words.get("allow_pickle") == "True"
            if bad:
                found[name_of(path)] = found.get(name_of(path), 0) + 1
    assert found == MAY_UNPICKLE


# Measuring a script, and the end of the last accelerated model: seldom, and what they do is no C function.
MAY_LET_GO = ("observe", "profile", "memory")


@pytest.mark.parametrize("path", [p for p in sources if unit_of(module_of(p)) not in MAY_LET_GO], ids=name_of)
def test_no_python_code_runs_when_an_object_is_gone(path):
    """A Ctrl-C would be lost there: Python prints what a finalizer or a weak reference's callback raises. lifetime.py
    has what does without; tables of modules and parameters, which go with a model, are Python's own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.name != "__del__", f"line {node.lineno}"
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        assert name not in ("finalize", "WeakValueDictionary"), f"line {node.lineno}"
        if name == "ref" and path.name != "lifetime.py":
            assert len(node.args) < 2, f"line {node.lineno}: a callback in Python"


@pytest.mark.parametrize("path", [p for p in sources if p.name != "settings.py" and not command(p)], ids=name_of)
def test_the_environment_is_read_on_one_page(path):
    """Commands may show variables, or set them for a run; nothing else touches them."""
    assert not re.search(r"os\.(environ|getenv)", path.read_text()), "read variables through stretto.settings"


def test_every_variable_is_used_by_its_name():
    used = set(re.findall(r"STRETTO_[A-Z_]+", "\n".join(p.read_text() for p in sources if p.name != "settings.py")))
    assert used - set(VARIABLES) - set(_abi_constants()) == set()


def _abi_constants() -> set[str]:
    return set(re.findall(r"\bSTRETTO_[A-Z0-9_]+", (ROOT / "csrc" / "abi.h").read_text()))


def test_every_op_is_in_the_table():
    """Kernel(...) is called at the top of files in ops/; all of them are in KERNELS, and what users call is in OPS."""
    declared = set()
    for path in (PACKAGE / "ops").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            call = node.value if isinstance(node, ast.Assign) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Kernel":
                declared.add(ast.literal_eval(call.args[0]))
    assert declared == {kernel.name for kernel in KERNELS}
    for name, op in OPS.items():
        assert op.name == name
        assert inspect.getdoc(op.function), f"{name} has no docstring"
        assert inspect.getdoc(op.reference), f"the reference of {name} has no docstring"


HELPERS = {"struct", "pointer", "by_rows", "gather_ceiling", "row_dot"}  # of kernels, or only ever measured


def test_every_kernel_has_a_reference_and_a_line():
    """What cpu.py offers, reference.py specifies and schema.py lists."""
    for path in (PACKAGE / "kernels").glob("cpu*.py"):
        beside = PACKAGE / "kernels" / path.name.replace("cpu", "reference")
        kernels, references = _functions(path), _functions(beside)
        assert kernels - HELPERS <= references, f"{path.name}: {kernels - references - HELPERS}"
        for kernel in references & kernels:
            assert kernel in (schema.__doc__ or ""), f"{kernel} has no line in schema.py"


def _functions(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {n.name for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


def test_import_is_light(run_python):
    """import stretto needs neither typer nor rich, nor matplotlib, nor Triton."""
    # What torch and PyG load by themselves, where they find it, is theirs.
    code = "import sys, torch, torch_geometric; before = set(sys.modules); import stretto"
    finished = run_python(f"{code}; print(*set(sys.modules) - before)")
    assert finished.returncode == 0, finished.stderr
    loaded = {name.split(".")[0] for name in finished.stdout.split()}
    assert not loaded & {"typer", "rich", "matplotlib", "pymetis"}
    assert "stretto.cli" not in finished.stdout.split()


def test_public_names_exist():
    import stretto

    assert sorted(stretto.__all__) == stretto.__all__
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_path_of_anyones_machine():
    pattern = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|scratch)/\w")
    for path in tracked():
        if path.suffix not in (".npz", ".png", ".gif") and path.is_file():
            assert not pattern.search(path.read_text(errors="replace")), name_of(path)


def test_versions_agree():
    versions = {
        re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M).group(1),
        re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text()).group(1),
        re.search(r'_VERSION = "(.+)"', (PACKAGE / "kernels" / "native.py").read_text()).group(1),
        re.search(r'stretto_version\(void\) { return "(.+)"', (ROOT / "csrc" / "core" / "cpu.cpp").read_text()).group(
            1
        ),
    }
    assert len(versions) == 1, versions

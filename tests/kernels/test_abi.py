"""What Python says of libstretto's functions and structures is what the C files say."""

import re
import subprocess
from pathlib import Path

import pytest

from stretto.kernels import abi

ROOT = Path(__file__).resolve().parent.parent.parent


def _c(name: str) -> str:
    """A C file without its comments."""
    return re.sub(r"//[^\n]*", "", (ROOT / "csrc" / name).read_text())


CODES = (("p", r"\*|\("), ("u", r"\buint64_t\b"), ("i", r"\bint64_t\b"), ("n", r"\bint\b"), ("d", r"\bdouble\b"))


def code_of(declaration: str) -> str:
    """Which of CODES a parameter or a field is; s: text."""
    if "const char* name" in declaration:
        return "s"
    return next(code for code, pattern in CODES if re.search(pattern, declaration))


def exported() -> dict[str, str]:
    """Every function of abi.h and kernels.def, and the codes of its arguments."""
    functions = {}
    for name, arguments in re.findall(r"STRETTO_API[^;#]*?\b(stretto_\w+)\(([^;]*)\);", _c("abi.h")):
        arguments = re.sub(r"\(\*\w+\)\([^)]*\)", "* function", " ".join(arguments.split()))
        parts = [] if arguments in ("", "void") else arguments.split(",")
        functions[name] = "".join(map(code_of, parts))
    for name, pairs in re.findall(r"^(?:UNTYPED_)?KERNEL\((\w+),(.*?\))\)$", _c("kernels.def"), re.M | re.S):
        kinds = re.findall(r"\(([^(),]+),\s*\w+\)", pairs)
        functions[f"stretto_{name}"] = "".join(map(code_of, kinds)) + "n"  # and the number of threads
    return functions


def structures() -> dict[str, list[tuple[str, str, int]]]:
    """Every structure of abi.h: code, name and number of values of its fields."""
    found = {}
    sizes = {name: int(value) for name, value in re.findall(r"(STRETTO_\w+) = (\d+)", _c("abi.h"))}
    for body, name in re.findall(r"typedef struct \{(.*?)\} stretto_(\w+);", _c("abi.h"), re.S):
        fields = []
        for declaration in filter(None, (" ".join(d.split()) for d in body.split(";"))):
            kind, names = re.fullmatch(r"((?:const )?\w+(?:\*(?: const\*)?)?) (.*)", declaration).groups()
            for field in names.split(", "):
                plain, _, count = field.rstrip("]").partition("[")
                fields.append((code_of(kind), plain, sizes.get(count) or int(count or 1)))
        found[name] = fields
    return found


def test_signatures_are_those_of_the_abi():
    assert exported() == abi.SIGNATURES
    assert set(abi.RESULTS) <= set(abi.SIGNATURES)


def test_structures_are_those_of_the_abi():
    codes = {kind: code for code, kind in abi.CODES.items()}
    for name, fields in structures().items():
        ours = vars(abi)[name.upper()]._fields_
        plain = [(kind, 1) if kind in codes else (kind._type_, kind._length_) for _, kind in ours]
        assert fields == [(codes[k], n, count) for (n, _), (k, count) in zip(ours, plain, strict=True)], name


def test_the_library_exports_the_abi_and_nothing_else():
    library = ROOT / "build" / "libstretto.so"
    if not library.exists():
        pytest.skip("no build/libstretto.so")
    try:
        listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no nm on this machine")
    names = {line.split()[-1] for line in listed.stdout.splitlines() if line.split()[-2] in "TDBRVWu"}
    assert {n for n in names if not n.startswith("_Z")} == set(exported())
    assert not [n for n in names if n.startswith("_ZN7stretto")]

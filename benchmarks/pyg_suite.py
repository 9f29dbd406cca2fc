"""PyG's own tests with the plug-in on.

python benchmarks/pyg_suite.py CHECKOUT [FOLDER_OR_FILE ...] [-k EXPRESSION]

CHECKOUT is a clone of PyG, at the version that is installed; the tests are its, the code under test is the installed
torch_geometric with stretto.patch() in force. What fails is run again without the plug-in: what fails there too is not
ours. The exit status is the number of tests that fail with the plug-in alone.

The same file is the pytest plug-in that the runs load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDERS = ("test/nn/conv", "test/nn/models")


def main() -> int:
    """Run, run the failures again as stock, tell."""
    parser = argparse.ArgumentParser(description="PyG's own tests with stretto.patch() in force")
    parser.add_argument("checkout", type=Path, help="a clone of PyG, at the installed version")
    parser.add_argument("tests", nargs="*", default=list(FOLDERS), help=f"default: {' '.join(FOLDERS)}")
    parser.add_argument("-k", dest="keyword", default="", help="pytest's -k: a selection by name")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for each of the two runs")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    targets = [str(checkout / test) for test in arguments.tests]
    missing = [target for target in targets if not Path(target).exists()]
    if missing:
        parser.error(f"not in the checkout: {', '.join(missing)}")
    outcomes = run(checkout, targets, arguments.keyword, arguments.timeout, on=True)
    failed = sorted(test for test, outcome in outcomes.items() if outcome == "failed")
    stock: dict[str, str] = {}
    if failed:
        again = sorted({str(checkout / test.split("::")[0]) for test in failed})
        stock = run(checkout, again, arguments.keyword, arguments.timeout, on=False)
    ours = [test for test in failed if stock.get(test) != "failed"]
    counts = {name: sum(outcome == name for outcome in outcomes.values()) for name in ("passed", "skipped")}
    print(f"passed          {counts['passed']}")
    print(f"skipped         {counts['skipped']}")
    print(f"failed          {len(ours)}")
    print(f"stock fails too {len(failed) - len(ours)}")
    for test in ours:
        print(f"  failed: {test}")
    return min(len(ours), 100)


def run(checkout: Path, targets: list[str], keyword: str, timeout: int, *, on: bool) -> dict[str, str]:
    """Outcome of every test of the targets, in a process of its own."""
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-p", here.stem, f"--outcomes={results}", f"--rootdir={checkout}"]
        command += ["-c", str(checkout / "pyproject.toml"), "--capture=fd", "-q", "--color=no", *targets]
        if on:
            command.append("--plug-in")
        if keyword:
            command += ["-k", keyword]
        # Run from elsewhere: the tests meet the installed torch_geometric, not the one beside them.
        given = os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join([str(here.parent), str(here.parent.parent), *([given] if given else [])])
        process = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, timeout=timeout)
        if not results.exists():
            raise SystemExit(f"pytest ended with status {process.returncode} and told nothing")
        found: dict[str, str] = json.loads(results.read_text())
        return found


# ---- the pytest plug-in ----

_outcomes: dict[str, str] = {}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcomes", help="where to write the outcome of every test")
    parser.addoption("--plug-in", action="store_true", dest="plug_in", help="run with stretto.patch() in force")


def pytest_configure(config: Any) -> None:
    if config.getoption("plug_in"):
        import stretto

        stretto.patch()


def pytest_runtest_logreport(report: Any) -> None:
    """A test that fails in any phase has failed; else what its call says, or its set-up if it was skipped."""
    tells = report.failed or report.when == "call" or (report.skipped and report.nodeid not in _outcomes)
    if tells and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: Any) -> None:
    Path(session.config.getoption("outcomes")).write_text(json.dumps(_outcomes))


if __name__ == "__main__":
    sys.exit(main())

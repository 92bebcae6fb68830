"""Faults planted in the product, one at a time, and whether the tests that should find them do.

    python -m benchmarks.mutants [--only WORD] [--jobs N]

The list is `mutants.toml`. Each fault is planted in a copy of the tree, never in the checkout; there the tests that it
names are run until the first fails. Before that all of them are seen to pass in the copy, since a test that fails by
itself finds nothing. A fault whose old text does not stand exactly once in its file is an error: so the list cannot
outlive the code that it is about.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_name("mutants.toml")

#: Folders of the tree that the tests need, with their caches, which spare every run the compiling.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "dist")
#: For the tests of one fault: those that hang are ended by their own deadlines long before.
DEADLINE_S = 240.0
BASELINE_S = 1800.0  #: for all tests that the list names
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)
PASSED, FAILING = 0, 1  #: exit statuses of pytest; the others say that nothing was tested


@dataclass(frozen=True)
class Fault:
    """One change of product code that breaks `rule`, and the tests that have to find it."""

    name: str
    file: str
    old: str
    new: str
    rule: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for a fault that changes nothing, or that no test is named for."""
        if not self.tests or not self.old or self.old == self.new:
            raise ValueError(f"the fault {self.name!r} needs an old text, another new one, and tests")

    def planted(self, root: Path) -> str:
        """The file's text with the fault in it.

        Raises ValueError unless the old text stands there exactly once.
        """
        file = root / self.file
        text = file.read_text() if file.is_file() else ""
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"the fault {self.name!r}: its old text stands {found} times in {self.file}, not once; bring the entry "
                f"in {FAULTS.name} up to the code"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """caught_by: the test that failed first; "": none did. problem: why there is no verdict; "": there is one."""

    fault: Fault
    caught_by: str
    problem: str
    seconds: float

    def __str__(self) -> str:
        said = self.problem or self.caught_by or "SURVIVED"
        return f"{self.fault.rule:<4} {self.fault.file:<34} {self.fault.name:<64} {said} ({self.seconds:.1f} s)"


def read(file: Path = FAULTS) -> list[Fault]:
    """The list. Raises ValueError, TypeError for an entry that is none, and ValueError where a name comes twice."""
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in tomllib.loads(file.read_text())["fault"]]
    names = [fault.name for fault in faults]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file.name} has {', '.join(twice)} twice; each fault needs a name of its own")
    return faults


@contextmanager
def scratch(root: Path = ROOT) -> Iterator[Path]:
    """A copy of the tree, for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="tensorferry-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=LEFT_OUT)
        yield copy


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in this tree for the length of the block. Raises ValueError as `Fault.planted`."""
    file = tree / fault.file
    sound, broken = file.read_text(), fault.planted(tree)
    try:
        _write(file, broken)
        yield
    finally:
        _write(file, sound)


def _write(file: Path, text: str) -> None:
    """A source that changes within the clock's grain, and keeps its length, looks unchanged: so its cache goes too."""
    file.write_text(text)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run(tree: Path, tests: Iterable[str], deadline_s: float) -> tuple[int | None, str]:
    """pytest's exit status and output for these tests in a tree, up to the first that fails; None: they took longer
    than the deadline, and were ended."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "400", "TENSORFERRY_SHRINK": "no"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            status: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def judge(fault: Fault, tree: Path) -> Verdict:
    """Plant the fault in a tree that is used for nothing else meanwhile, and see which test finds it."""
    began = time.monotonic()
    with planted(fault, tree):
        status, output = run(tree, fault.tests, DEADLINE_S)
    caught_by, problem = "", ""
    if status == FAILING:
        found = FAILED.search(output)
        caught_by = found[1] if found else "a test that pytest does not name"
    elif status != PASSED:
        last = "\n".join(output.splitlines()[-12:])
        how = f"took over {DEADLINE_S:g} s" if status is None else f"ended with pytest's status {status}"
        problem = f"NO VERDICT: its tests {how}: {last}"
    return Verdict(fault, caught_by, problem, time.monotonic() - began)


def check_sound(tree: Path, faults: Sequence[Fault]) -> str:
    """Why a verdict would mean nothing: what the named tests say of a tree without a fault; "": they pass."""
    where = subprocess.run(
        [sys.executable, "-c", "import tensorferry; print(tensorferry.__file__)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(where).is_relative_to(tree):
        return f"tests in the copy at {tree} import {where}, which is not of it"
    status, output = run(tree, sorted({test for fault in faults for test in fault.tests}), BASELINE_S)
    return "" if status == PASSED else f"without a fault, pytest's status is {status}: {output[-4000:]}"


def judge_all(faults: Sequence[Fault], jobs: int, tell: Callable[[Verdict], None]) -> tuple[list[Verdict], str]:
    """Verdicts on these, in their order, with `jobs` at a time; and why there are none, "" where there are."""
    with scratch() as first:
        if problem := check_sound(first, faults):
            return [], problem
        trees: SimpleQueue[Path] = SimpleQueue()
        trees.put(first)
        for number in range(1, jobs):
            trees.put(shutil.copytree(first, first.with_name(f"tree-{number}"), symlinks=True))

        def one(fault: Fault) -> Verdict:
            tree = trees.get()
            try:
                verdict = judge(fault, tree)
            finally:
                trees.put(tree)
            tell(verdict)
            return verdict

        with ThreadPoolExecutor(jobs) as threads:
            return list(threads.map(one, faults)), ""


def main() -> int:
    """Print the table; status 1 where a fault survives, or where there is no verdict on one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name, file or rule has this word")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time (2)")
    options = parser.parse_args()
    faults = [each for each in read() if options.only in f"{each.name} {each.file} {each.rule}"]
    if not faults:
        print(f"no fault has {options.only!r} in its name, file or rule")
        return 1
    for fault in faults:
        fault.planted(ROOT)
    verdicts, problem = judge_all(faults, max(1, options.jobs), lambda verdict: print(verdict, flush=True))
    if problem:
        print(problem)
        return 1
    missed = [verdict for verdict in verdicts if not verdict.caught_by]
    print(f"\n{len(verdicts)} faults planted, {len(verdicts) - len(missed)} found, {len(missed)} not:")
    for verdict in missed:
        print(verdict)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

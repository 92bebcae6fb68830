"""The list of planted faults is up to the code, and who judges them tells found, missed and no verdict apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import mutants
from benchmarks.mutants import ROOT, Fault, check_sound, judge, judge_all, planted, read

FAULTS = read()

PRODUCT, TEST = "def double(number: int) -> int:\n    return 2 * number\n", "tests/test_double.py"
BROKEN = Fault("it triples", "src/tensorferry/__init__.py", "return 2 *", "return 3 *", "law", (TEST,))
HARMLESS = replace(BROKEN, name="it says the same", new="return 1 + 1 *")
MEANINGLESS = replace(BROKEN, name="it is no Python", new="return (")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of one function, and its test, which looks at one number alone."""
    tree = tmp_path / "tree"
    for file, text in (
        ("src/tensorferry/__init__.py", PRODUCT),
        (TEST, "import tensorferry\n\n\ndef test_it_doubles() -> None:\n    assert tensorferry.double(1) == 2\n"),
        ("pytest.ini", "[pytest]\n"),
    ):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)
    return tree


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted_and_names_tests_that_there_are(fault: Fault) -> None:
    compile(fault.planted(ROOT), fault.file, "exec")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), f"{file} is not there"
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_there_are_many_and_all_in_the_product() -> None:
    assert len(FAULTS) >= 60
    assert {fault.file.partition("/")[0] for fault in FAULTS} == {
        "cli",
        "codecs",
        "connectors",
        "pipeline",
        "replay",
        "stages",
    }


@pytest.mark.parametrize(("text", "times"), [("nothing of it", 0), ("number", 2)])
def test_a_fault_whose_text_is_not_there_once_is_an_error_that_names_it(tree: Path, text: str, times: int) -> None:
    fault = replace(BROKEN, old=text)
    with pytest.raises(ValueError, match=f"'it triples': its old text stands {times} times in src/tensorferry"):
        fault.planted(tree)
    with pytest.raises(ValueError, match="stands 0 times"):
        replace(BROKEN, file="src/gone.py").planted(tree)


@pytest.mark.parametrize("change", [{"tests": ()}, {"new": BROKEN.old}, {"old": ""}])
def test_an_entry_that_changes_or_tests_nothing_is_an_error(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'it triples' needs an old text, another new one, and tests"):
        replace(BROKEN, **change)


def test_a_name_stands_once_in_the_list(tmp_path: Path) -> None:
    entry = '[[fault]]\nname = "a"\nfile = "f"\nold = "1"\nnew = "2"\nrule = "L1"\ntests = ["t"]\n'
    (tmp_path / "list.toml").write_text(2 * entry)
    with pytest.raises(ValueError, match=r"list\.toml has a twice"):
        read(tmp_path / "list.toml")


@pytest.mark.processes
def test_found_missed_and_no_verdict_are_told_apart_and_the_tree_is_as_before(tree: Path) -> None:
    assert check_sound(tree, [BROKEN]) == ""
    assert judge(BROKEN, tree).caught_by == f"{TEST}::test_it_doubles"
    missed, senseless = judge(HARMLESS, tree), judge(MEANINGLESS, tree)
    assert (missed.caught_by, missed.problem) == ("", "")
    assert senseless.caught_by == ""
    assert "NO VERDICT: its tests ended with pytest's status 2" in senseless.problem
    assert "SURVIVED" in str(missed)
    assert (tree / BROKEN.file).read_text() == PRODUCT
    assert judge(BROKEN, tree).caught_by, "nothing of an earlier fault is cached"


@pytest.mark.processes
def test_tests_that_fail_without_a_fault_find_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / TEST).write_text("def test_it() -> None:\n    assert False\n")
    assert "without a fault, pytest's status is 1" in check_sound(tree, [BROKEN])
    real = mutants.scratch
    monkeypatch.setattr(mutants, "scratch", lambda: real(tree))
    verdicts, problem = judge_all([BROKEN], 1, lambda verdict: None)
    assert verdicts == []
    assert "without a fault" in problem
    assert (tree / BROKEN.file).read_text() == PRODUCT


@pytest.mark.processes
def test_faults_are_planted_in_copies_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mutants.scratch
    monkeypatch.setattr(mutants, "scratch", lambda: real(tree))
    told: list[str] = []
    verdicts, problem = judge_all([BROKEN, HARMLESS], 2, lambda verdict: told.append(verdict.fault.name))
    assert (problem, [bool(verdict.caught_by) for verdict in verdicts]) == ("", [True, False])
    assert sorted(told) == sorted([BROKEN.name, HARMLESS.name])
    assert (tree / BROKEN.file).read_text() == PRODUCT
    with real(tree) as copy, planted(BROKEN, copy):
        assert (copy / BROKEN.file).read_text() != PRODUCT
        assert (tree / BROKEN.file).read_text() == PRODUCT

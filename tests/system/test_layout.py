"""The tree is the architecture: what is packaged, what each part may import, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tensorferry

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tensorferry"
FOLDERS = ("cli", "codecs", "configs", "connectors", "pipeline", "replay", "stages")


def setuptools() -> dict[str, Any]:
    """What pyproject.toml says of packages."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    found: dict[str, Any] = settings["setuptools"]
    return found


def imported_by(program: str) -> set[str]:
    """The top-level modules that a new interpreter has after running this."""
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_root_codecs_is_no_regular_package() -> None:
    """With an __init__.py here, mypy run in this folder takes it for the standard library's codecs."""
    assert not (ROOT / "codecs" / "__init__.py").exists()


def test_version_and_configs() -> None:
    assert tensorferry.__version__ == version("tensorferry")
    assert files("tensorferry").joinpath("configs", "local.yaml").read_text()


@pytest.mark.parametrize("name", FOLDERS)
def test_import_names_are_links_to_the_root_folders(name: str) -> None:
    """A clone without symbolic links has text files here, and would build an empty wheel."""
    assert (SOURCE / name).is_symlink()
    assert (SOURCE / name).readlink() == Path("../..") / name
    assert (SOURCE / name).is_dir()


def test_every_folder_with_code_is_packaged() -> None:
    """The list is by hand, and a folder that is not on it is missing from the wheel alone."""
    listed = setuptools()["packages"]
    found = {
        ".".join(("tensorferry", *module.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for module in (ROOT / folder).rglob("*.py")
    }
    assert found | {"tensorferry"} == set(listed)
    assert listed == sorted(listed)


def test_every_package_but_codecs_says_what_it_is() -> None:
    for name in setuptools()["packages"]:
        folder = SOURCE.joinpath(*name.split(".")[1:])
        if name != "tensorferry.codecs":
            assert (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""'), name


def test_data_files_are_packaged() -> None:
    """Whatever a package has beside its modules is matched by package-data."""
    patterns = setuptools()["package-data"]["tensorferry"]
    packaged = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    for folder in FOLDERS:
        for path in (SOURCE / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".md"):
                assert path in packaged, f"{path} would be missing from the wheel"


@pytest.mark.processes
def test_a_module_that_only_wants_a_name_pays_for_nothing() -> None:
    assert not {"torch", "numpy", "zmq", "msgspec", "asyncio", "structlog"} & imported_by("import tensorferry")


@pytest.mark.processes
@pytest.mark.parametrize(
    "program",
    [
        "import tensorferry.codecs.pool.pool",
        "import tensorferry.codecs.pool.publisher",
        "import tensorferry.codecs.pool.reader",
        "import tensorferry; tensorferry.Pool, tensorferry.Publisher, tensorferry.Reader, tensorferry.Proxy",
        "import tensorferry; tensorferry.Pool.create(4096, 4).close()",
    ],
)
def test_the_library_imports_without_torch_event_loop_or_sockets(program: str) -> None:
    found = imported_by(program)
    assert "numpy" in found
    assert not {"torch", "asyncio", "zmq", "structlog", "multiprocessing"} & found


@pytest.mark.parametrize("name", [name for name in tensorferry.__all__ if name != "__version__"])
def test_names_are_imported_on_first_use(name: str) -> None:
    assert getattr(tensorferry, name) is getattr(import_module(tensorferry._HOMES[name]), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Wagon'"):
        tensorferry.Wagon  # noqa: B018

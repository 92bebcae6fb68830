"""What the extra configuration may say, and what is said of a mistake."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tensorferry.codecs.errors import DeploymentError
from tensorferry.connectors.ec.settings import Settings


def test_a_folder_is_enough() -> None:
    settings = Settings.of({"folder": "/run/ec"})
    assert (settings.memory, settings.budget_mb, settings.patience_ms) == ("shm", 256, 30_000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "missing required field `folder`"),
        ({"folder": "ec"}, "folder: 'ec' is no absolute path"),
        ({"folder": f"/{'x' * 60}"}, "no absolute path of at most 59 bytes"),
        ({"folder": "/ec", "pool": 1}, "unknown field `pool`; its keys are folder, model, keys, memory"),
        ({"folder": "/ec", "memory": "host"}, "Invalid enum value 'host' - at `\\$.memory`"),
        ({"folder": "/ec", "patience_s": 0}, "> 0"),
        ({"folder": "/ec", "listen": "tcp://0.0.0.0:1"}, "set security.keys"),
        ({"folder": "/ec", "producers": ["tcp://*:1"]}, "refused"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        Settings.of(given)


def test_the_folder_is_made_for_this_user_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as place:
        folder = Settings.of({"folder": f"{place}/ec"}).prepare()
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o750)
        with pytest.raises(DeploymentError, match=r"is open to others .mode 0750.; chmod 700 it"):
            Settings.of({"folder": f"{place}/ec"}).prepare()
        Path(place, "file").touch()
        with pytest.raises(DeploymentError, match=r"cannot be made: File exists|is no folder of user"):
            Settings.of({"folder": f"{place}/file"}).prepare()
        Path(place).chmod(0o777)
        folder.chmod(0o700)
        with pytest.raises(DeploymentError, match="has no sticky bit"):
            Settings.of({"folder": f"{place}/ec"}).prepare()

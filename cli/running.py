"""Settings that are given beside those of the deployment that runs: one that differs is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError, all_of
from tensorferry.pipeline.deployment.load import placed
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.running_settings import differences, told
from tensorferry.pipeline.process.runtime_dir import Runtime

REMEDY = "give the settings that it was started with, or stop it and start it with these"


def as_running(deployment: Deployment, file: Path, settings: Sequence[str]) -> Deployment | None:
    """The deployment of FILE with what was decided when it was started: its transport, and whether it uses GPUs.

    None where no process of it has left its settings on this machine. Raises ConfigError, which names every key whose
    value is another than a running process has, with both values.
    """
    running = told(Runtime.of(deployment))
    found = [ConfigError(UNPLACED, None, one.key, str(one)) for one in differences(deployment, running)]
    if found:
        found[-1] = ConfigError(UNPLACED, None, found[-1].key, f"{found[-1].problem}; {REMEDY}")  # once is enough
        raise all_of([placed(problem, file, settings) for problem in found])
    if not running:
        return None
    theirs = next(iter(running.values()))
    return msgspec.structs.replace(deployment, transport=theirs["transport"], gpus=theirs["gpus"])

"""The check that the given settings are those of the running deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError, all_of
from tensorferry.pipeline.deployment.load import placed
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.running_settings import differences, told
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.stages.adapters.registry import takes_media

REMEDY = "give the settings that the deployment was started with, or stop it and start it with these"


def as_running(deployment: Deployment, file: Path, settings: Sequence[str]) -> Deployment | None:
    """Return the deployment of FILE with its start's decisions: the transport, and whether it uses GPUs.

    Returns None if none of its processes has left its settings on this machine. Raises ConfigError, which names every
    key that has another value in a running process, with both values.
    """
    running = told(Runtime.of(deployment))
    # A model that takes text alone has no pools, so the transport that the file names does not matter.
    ours = (
        deployment if takes_media(deployment.model.adapter) else msgspec.structs.replace(deployment, transport="auto")
    )
    found = [ConfigError(UNPLACED, None, one.key, str(one)) for one in differences(ours, running)]
    if found:
        found[-1] = ConfigError(UNPLACED, None, found[-1].key, f"{found[-1].problem}; {REMEDY}")  # once, for all
        raise all_of([placed(problem, file, settings) for problem in found])
    if not running:
        return None
    theirs = next(iter(running.values()))
    return msgspec.structs.replace(deployment, transport=theirs["transport"], gpus=theirs["gpus"])

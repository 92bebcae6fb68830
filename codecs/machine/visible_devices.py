"""CUDA_VISIBLE_DEVICES, read without a driver and without surprises."""

from __future__ import annotations

import re

from tensorferry.codecs.errors import FerryError

VARIABLE = "CUDA_VISIBLE_DEVICES"

_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F]{1,8}[0-9a-fA-F-]*\Z|MIG-GPU-[0-9a-fA-F-]+/[0-9]+/[0-9]+\Z")
_INDEX = re.compile(r"[0-9]{1,4}\Z")
SHOWN = 80  #: characters of a user's text that an error repeats


class BadVisibleDevices(FerryError):
    """CUDA_VISIBLE_DEVICES says something that CUDA would read otherwise than it looks."""

    def __init__(self, value: str, problem: str) -> None:
        super().__init__(value, problem)
        self.value, self.problem = value, problem

    def __str__(self) -> str:
        value = self.value if len(self.value) <= SHOWN else self.value[:SHOWN] + "..."
        return f"{VARIABLE}={value!a} {self.problem}"


def visible_devices(value: str | None) -> tuple[str, ...] | None:
    """The devices that a value of CUDA_VISIBLE_DEVICES names, in order; None where it is not set: all there are.

    An entry is an index ("0") or a UUID, perhaps its beginning ("GPU-8932f937"). Spaces around entries do not count;
    a negative index hides itself and what follows, as it does for CUDA. Raises BadVisibleDevices for what CUDA would
    silently cut short: a device named twice, indices mixed with UUIDs, anything else.
    Source: CUDA programming guide, appendix on environment variables.
    """
    if value is None:
        return None
    entries: list[str] = []
    if not value.strip():
        return ()
    for entry in (part.strip() for part in value.split(",")):
        if re.match(r"-[0-9]+\Z", entry):
            break
        if not _INDEX.match(entry) and not _UUID.match(entry):
            raise BadVisibleDevices(value, f"names {entry[:SHOWN]!a}, which is neither an index nor a UUID")
        entry = str(int(entry)) if _INDEX.match(entry) else entry
        if entry.lower() in (earlier.lower() for earlier in entries):
            raise BadVisibleDevices(value, f"names {entry} twice")
        entries.append(entry)
    if len({entry.isdigit() for entry in entries}) > 1:
        raise BadVisibleDevices(value, "mixes indices and UUIDs")
    return tuple(entries)

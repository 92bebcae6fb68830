"""The moment at which a process is to die or to stop: before the n-th line that it runs of the code under test."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

#: Parts of the paths of the code under test, and of the test's own which uses it.
COUNTED = ("/codecs/", "/pipeline/", "/lives/")


class Fate:
    """Counts from `arm` on, in all threads."""

    def __init__(self, line: int, signal: int) -> None:
        self._left, self._signal = line, signal
        self._counted: dict[CodeType, bool] = {}

    def arm(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def disarm(self) -> None:
        """What has not happened by now never will."""
        self._left = 0
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        counted = self._counted.get(frame.f_code)
        if counted is None:
            counted = any(part in frame.f_code.co_filename for part in COUNTED)
            self._counted[frame.f_code] = counted
        return self._line if counted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._signal)
        return self._line

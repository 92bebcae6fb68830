"""The moment at which a process is to die or to stop: before the n-th line that it runs of the code under test."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: Parts of the paths of the code under test, and of the test's own which uses it.
COUNTED = ("/codecs/", "/pipeline/", "/lives/")
NOT_COUNTED = "/available.py"  #: reads /proc in a loop that would swallow half of all fates


class Fate:
    """Counts from `arm` on, in all threads."""

    def __init__(self, line: int, signal: int, last_words: Callable[[str], None]) -> None:
        """last_words: is told where it happens."""
        self._left, self._signal, self._last_words = line, signal, last_words
        self._armed = True
        self._counted: dict[CodeType, bool] = {}

    def arm(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def disarm(self) -> None:
        """What has not happened by now never will."""
        self._armed = False  # not a count of 0, which a thread might be about to overwrite
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        counted = self._counted.get(frame.f_code)
        if counted is None:
            path = frame.f_code.co_filename
            counted = any(part in path for part in COUNTED) and not path.endswith(NOT_COUNTED)
            self._counted[frame.f_code] = counted
        return self._line if counted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0 and self._armed:
                self._last_words(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                os.kill(os.getpid(), self._signal)
        return self._line

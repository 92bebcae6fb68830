"""What a client is given for parts of a prompt: taken, or refused with the part, what it is and what it may be."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import BadRequest
from tensorferry.pipeline.parts import Embeddings, Image, Video, on_wire, prompt_on_wire


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (None, "parts is a NoneType; a list is needed, of text, token ids"),
        (5, "parts is a int; a list"),
        (["a", None], "part 1: a NoneType; it must be text, token ids (a numpy array), an encoded image"),
        ([5], "part 0: a int"),
        ([{"text": "a"}], "part 0: a dict"),
        ([Embeddings(np.zeros((3, 256)))], "part 0: embeddings in a ndarray; give the tensors by name"),  # type: ignore[arg-type]
        ([Embeddings(None)], "part 0: embeddings in a NoneType"),  # type: ignore[arg-type]
        ([Video(None)], "part 0: a video of a NoneType; give the bytes of a file, its path"),  # type: ignore[arg-type]
        ([Video([])], "part 0: a video of no frames; give one or more"),
        ([Video([b"a", "b.png"])], "part 0: frame 1 of a video is a str; give bytes"),  # type: ignore[list-item]
        ([Video([b"a"], fps=1e300)], "part 0: a video at 1e+300 fps; give 0.001 to 1000000"),
        ([Video([b"a"], fps=float("nan"))], "part 0: a video at nan fps"),
        ([Video([b"a"], fps="2")], "part 0: a video at '2' fps"),  # type: ignore[arg-type]
        ([Image(None)], "part 0: a file given as a NoneType; give the bytes of a file"),  # type: ignore[arg-type]
        ([Image("\0")], "part 0: cannot read '\\x00': "),
        ([Image("http://a/b.jpg")], "part 0: 'http://a/b.jpg' is an address, and nothing is ever fetched; give the"),
        ([Video("s3://a/b.gif")], "part 0: 's3://a/b.gif' is an address, and nothing is ever fetched; give the"),
    ],
)
def test_what_is_no_part_is_named(parts: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        prompt_on_wire(parts, [])


@pytest.mark.parametrize("kind", [Image, Video])
def test_a_pipe_is_refused_and_not_waited_for(kind: type[Image | Video], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(BadRequest) as caught:
            on_wire(kind(tmp_path / "pipe"), [])
        said.append(str(caught.value))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    assert said == [f"cannot read '{tmp_path / 'pipe'}': not a regular file"]


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    with pytest.raises(BadRequest, match="not a regular file"):
        on_wire(Image(device), [])


def test_a_file_is_read_as_far_as_its_limit(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 20 << 30)
    with pytest.raises(BadRequest, match=f"{20 << 30} bytes; at most 10 are read"):
        on_wire(Image(tmp_path / "sparse"), [], file_nbytes=10)
    os.truncate(tmp_path / "sparse", 10)
    frames: list[Any] = []
    on_wire(Image(tmp_path / "sparse"), frames, file_nbytes=10)
    assert frames == [bytes(10)]


def test_a_file_that_says_it_is_empty_is_bounded_too() -> None:
    with pytest.raises(BadRequest, match="more than 3 bytes"):
        on_wire(Image("/proc/self/status"), [], file_nbytes=3)

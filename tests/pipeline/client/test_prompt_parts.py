"""What a client is given for parts of a prompt: taken, or refused with the part, what it is and what it may be."""

from __future__ import annotations

import os
import re
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest
from tensorferry.codecs.frames import Limits, decode, encode
from tensorferry.pipeline.client.prompt_parts import Embeddings, Image, Video, on_wire, prompt_on_wire


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (None, "parts is a NoneType; a list is needed, of text, token ids"),
        (5, "parts is a int; a list"),
        (["a", None], "part 1: a NoneType; it must be text, token ids (a numpy array), an encoded image"),
        ([5], "part 0: a int"),
        ([{"text": "a"}], "part 0: a dict"),
        ([Embeddings(np.zeros((3, 256)))], "part 0: embeddings in a ndarray; give a mapping of tensors by name"),  # type: ignore[arg-type]
        ([Embeddings(None)], "part 0: embeddings in a NoneType"),  # type: ignore[arg-type]
        ([Video(None)], "part 0: a video of a NoneType; give the bytes of a file, its path"),  # type: ignore[arg-type]
        ([Video([])], "part 0: a video of no frames; give one or more"),
        ([Video([b"a", "b.png"])], "part 0: frame 1 of a video is a str; give bytes"),  # type: ignore[list-item]
        ([Video([b"a"], fps=1e300)], "part 0: a video at 1e+300 fps; give a number from 0.001 to 1000000"),
        ([Video([b"a"], fps=float("nan"))], "part 0: a video at nan fps"),
        ([Video([b"a"], fps=True)], "part 0: a video at True fps; give a number from 0.001"),
        ([Image("data:;base64,_w==")], "are not base64: Only base64 data is allowed; write + and / instead of - and _"),
        ([Video([b"a"], fps="2")], "part 0: a video at '2' fps"),  # type: ignore[arg-type]
        ([], "0 parts; give 1 to 4096"),
        (["a"] * 4097, "4097 parts; give 1 to 4096"),
        (["a", "b\ud800"], "part 1: a text is not valid Unicode: character 1 is the lone surrogate '\\ud800'"),
        (["a" * (1 + (1 << 22))], "part 0: a text of 4194305 characters; at most 4194304 are taken"),
        ([np.zeros(1 + (1 << 22), np.int32)], "part 0: 4194305 token ids; at most 4194304 are taken"),
        ([Video([b""] * 65536)], "part 0: a video of 65536 frames; at most 65535 are taken"),
        ([Image(None)], "part 0: a file given as a NoneType; give the bytes of a file"),  # type: ignore[arg-type]
        ([Image("\0")], "part 0: cannot read '\\x00': "),
        ([Image("http://a/b.jpg")], "part 0: 'http://a/b.jpg' is a URL, and files are never fetched; give the"),
        ([Video("s3://a/b.gif")], "part 0: 's3://a/b.gif' is a URL, and files are never fetched; give the"),
    ],
)
def test_what_is_no_part_is_named(parts: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        prompt_on_wire(parts, [])


ROWS = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("outputs", "modality", "said"),
    [
        ({"x" * 65: ROWS}, "image", "part 1: output 'xxx"),
        (
            {"x" * 65: ROWS},
            "image",
            ": its name must be a text of 1 to 64 characters, the name that the deployment's model",
        ),
        ({"": ROWS}, "image", "part 1: output '': its name must be a text of 1 to 64 characters"),
        ({5: ROWS}, "image", "part 1: output 5: its name must be a text"),
        ({None: ROWS}, "image", "part 1: output None: its name must be a text"),
        ({"\ud800": ROWS}, "image", "part 1: output '\\ud800': its name is not valid Unicode"),
        ({f"x{i}": ROWS for i in range(16)}, "image", "part 1: an item of embeddings with 17 outputs; at most 16"),
        ({}, "audio", "part 1: embeddings of modality 'audio'; image and video have placeholders"),
        ({}, "x" * 65, "part 1: embeddings of modality 'xxx"),
        ({}, 5, "part 1: embeddings of modality 5; image and video"),
    ],
)
def test_an_output_that_cannot_travel_is_named(outputs: dict[Any, Any], modality: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        prompt_on_wire(["a", Embeddings({"embeddings": ROWS, **outputs}, modality)], [])


def test_what_is_just_taken_can_be_decoded() -> None:
    outputs = {"embeddings": ROWS, **{"\U0001f600" * 60 + f"{i}": ROWS for i in range(15)}}
    frames: list[Any] = []
    texts, ids = "\U0001f600" * (1 << 22), np.zeros(1 << 22, np.int32)
    parts = prompt_on_wire([texts, ids, Embeddings(outputs, "video"), Video([b""] * 65535)], frames)
    message, _ = decode(
        encode(wire.Submit(bytes(16), 0, parts, 1, 1000), frames), Limits(frames=1 << 20, header_nbytes=64 << 20)
    )
    assert isinstance(message, wire.Submit)
    assert message.parts == parts
    parts = prompt_on_wire(["a"] * 4096, frames)
    decode(encode(wire.Submit(bytes(16), 0, parts, 1, 1000)), Limits())


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


@pytest.mark.parametrize("fps", [np.float32(2.5), np.float64(2.5), np.int32(2), np.uint8(3), 2.5, Fraction(5, 2)])
def test_a_rate_is_any_real_number(fps: Any) -> None:
    [part] = prompt_on_wire([Video([b"a"], fps=fps)], [])
    assert isinstance(part, wire.VideoPart)
    assert Fraction(*part.rate) == Fraction(float(fps))

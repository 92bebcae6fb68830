"""A replay invents sizes of the right distribution, and photos and prompts with the same bytes every time."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from PIL import Image as Pillow

from tensorferry.pipeline.recording.request import Image, Request
from tensorferry.replay.trace.loaded_trace import Trace
from tensorferry.replay.trace.seeds import choose
from tensorferry.replay.workload.image_sizes import SIDES, SizeModel
from tensorferry.replay.workload.photos import MAX_PHOTOS, Photo, PhotoError, load_photos
from tensorferry.replay.workload.prepare import Invented, Preparation, UnusableSize, prepare
from tensorferry.replay.workload.token_ids import TokenSource

PX = 28  # of a token's side


class FakeProcessor:
    """A token is 28 x 28 pixels; token counts are made of at least two in each direction."""

    def __init__(self) -> None:
        self.asked = 0

    def rows_for(self, width: int, height: int) -> int:
        if width * height > 40_000_000:
            raise UnusableSize(f"{width} x {height} is too large")
        return max(1, round(width / PX)) * max(1, round(height / PX))

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        self.asked += 1
        if rows > 100_000:
            raise UnusableSize(f"no image has {rows} tokens")
        height = min(range(2, rows), key=lambda side: (rows % side != 0, abs(rows / side**2 - aspect)), default=1)
        return rows // height * PX, height * PX


def request(line: int = 1, **fields: object) -> Request:
    return Request(line=line, at_ns=line, output_tokens=1, **fields)  # type: ignore[arg-type]


def trace_of(*requests: Request, path: Path = Path("trace.jsonl")) -> Trace:
    return Trace(path, "", "tensorferry", False, len(requests), list(requests), [], 0, {})


def made(*requests: Request, seed: int = 0, path: Path = Path("trace.jsonl"), **options: object) -> Preparation:
    tokens = TokenSource(1000, [0, 1, 2], seed)
    photos = options.pop("photos", None) or load_photos(None)
    trace = trace_of(*requests, path=path)
    return prepare(trace, photos, FakeProcessor(), tokens, seed=seed, **options)  # type: ignore[arg-type]


def size_of(jpeg: bytes) -> tuple[int, int]:
    with Pillow.open(io.BytesIO(jpeg)) as image:
        image.load()
        assert (image.format, image.mode) == ("JPEG", "RGB")
        return image.size


# --- sizes -------------------------------------------------------------------------------------------------------


def test_modelled_sizes_have_the_published_quantiles() -> None:
    """ModServe, section 3.2: medians around 500 pixels, 95th percentiles above 1000."""
    sizes = [SizeModel(0).draw(line, 0) for line in range(10_000)]
    for sides in zip(*sizes, strict=True):
        assert 450 <= median(sides) <= 550
        assert 1000 < sorted(sides)[9_500] < 1200
    assert len(set(sizes)) < SIDES * 10


def test_a_size_depends_on_seed_line_and_index_alone() -> None:
    assert SizeModel(5).draw(17, 2) == SizeModel(5).draw(17, 2)
    draws = {
        (seed, line, index): SizeModel(seed).draw(line, index) for seed in (1, 2) for line in (1, 2) for index in (0, 1)
    }
    assert len(set(draws.values())) > 5


@pytest.mark.processes
def test_choices_are_the_same_in_every_process() -> None:
    """Python's own hash of a string is not."""
    program = "from tensorferry.replay.trace.seeds import choose; print(choose(3, 'photo', 17, 2))"
    said = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60).stdout
        for _ in range(2)
    }
    assert said == {b"%d\n" % choose(3, "photo", 17, 2)}
    assert choose(3, "photo", 17, 2) == 71199159790338447


# --- photos ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (28, 56), (500, 400), (2000, 30), (30, 2000), (65_500, 1), (3000, 3000)])
def test_a_photo_becomes_a_jpeg_of_exactly_that_size(size: tuple[int, int]) -> None:
    for photo in load_photos(None):
        assert size_of(photo.jpeg(*size)) == size


def test_photos_are_cropped_not_squeezed() -> None:
    """A circle stays a circle, since the middle of a photo that is twice as wide is cut out."""
    wide = Pillow.new("RGB", (400, 200), (255, 0, 0))
    wide.paste((0, 0, 255), (100, 0, 300, 200))
    with Pillow.open(io.BytesIO(Photo("wide", wide).jpeg(100, 100))) as image:
        corners = [image.getpixel(at) for at in ((2, 50), (97, 50))]
    assert all(isinstance(pixel, tuple) and pixel[2] > 200 and pixel[0] < 50 for pixel in corners)


def test_photos_compress_like_photos() -> None:
    for photo in load_photos(None):
        assert len(photo.jpeg(500, 400)) < 500 * 400 * 3 / 8


def test_bundled_photos_are_upright() -> None:
    coffee = next(photo for photo in load_photos(None) if photo.name == "coffee.jpg")
    assert coffee.aspect == 1.5  # it is stored standing, with EXIF orientation 6


def test_a_folder_gives_its_readable_images_in_the_order_of_names(tmp_path: Path) -> None:
    for number in range(MAX_PHOTOS + 3):
        Pillow.new("RGBA", (50, 40 + number)).save(tmp_path / f"{number:02}.png")
    (tmp_path / "00.txt").write_text("no image")
    (tmp_path / "00a.jpg").write_bytes(b"\xff\xd8\xff truncated")
    (tmp_path / "folder").mkdir()
    photos = load_photos(tmp_path)
    assert [photo.name for photo in photos] == [f"{number:02}.png" for number in range(MAX_PHOTOS)]


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(PhotoError, match="it has no image that can be read"):
        load_photos(tmp_path)
    with pytest.raises(PhotoError, match="No such file"):
        load_photos(tmp_path / "absent")


def test_a_photo_of_too_many_pixels_is_passed_over(tmp_path: Path) -> None:
    Pillow.new("1", (9000, 8000)).save(tmp_path / "bomb.png")
    Pillow.new("RGB", (30, 30)).save(tmp_path / "fine.png")
    assert [photo.name for photo in load_photos(tmp_path)] == ["fine.png"]


def test_large_photos_are_reduced(tmp_path: Path) -> None:
    Pillow.new("RGB", (4000, 1000)).save(tmp_path / "large.png")
    (photo,) = load_photos(tmp_path)
    assert photo.aspect == 4
    assert size_of(photo.jpeg(10, 10)) == (10, 10)


# --- what is sent ------------------------------------------------------------------------------------------------


def test_recorded_images_are_sent_byte_for_byte_from_beside_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces" / "pictures").mkdir(parents=True)
    damaged = b"\xff\xd8\xff damaged on purpose"
    (tmp_path / "traces" / "pictures" / "a.jpg").write_bytes(damaged)
    monkeypatch.chdir(tmp_path)
    row = request(images=(Image(path="pictures/a.jpg"), Image(path=str(tmp_path / "traces/pictures/a.jpg"))))
    preparation = made(row, path=Path("traces/trace.jsonl"))
    assert preparation.requests[0].images == (damaged, damaged)
    assert preparation.invented.images_recorded == 2
    assert preparation.invented.different_images == 1


def test_a_missing_image_drops_the_request_that_names_it(tmp_path: Path) -> None:
    rows = [request(line, images=(Image(path=name),)) for line, name in enumerate(("absent.jpg", "there.jpg", "."), 1)]
    (tmp_path / "there.jpg").write_bytes(b"x")
    preparation = made(*rows, path=tmp_path / "trace.jsonl")
    assert [prepared.request.line for prepared in preparation.requests] == [2]
    assert [(drop.line, drop.reason) for drop in preparation.drops] == [(1, "missing_image"), (3, "missing_image")]
    assert "absent.jpg: No such file" in preparation.drops[0].problem
    assert "Is a directory" in preparation.drops[1].problem


def test_b28_a_trace_reads_no_files_but_those_below_its_folder(tmp_path: Path) -> None:
    """A trace may come from others, and the files that it names are sent."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "tracery").mkdir()
    for name in ("secret", "trace/inside.jpg", "tracery/near.jpg"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "trace" / "link.jpg").symlink_to("inside.jpg")
    (tmp_path / "trace" / "out.jpg").symlink_to("../secret")
    (tmp_path / "trace" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "trace" / "pipe")
    good = ["inside.jpg", "link.jpg", "up/trace/inside.jpg", "../trace/inside.jpg", str(tmp_path / "trace/inside.jpg")]
    bad = ["../secret", "out.jpg", "up/secret", "../tracery/near.jpg", str(tmp_path / "secret"), "/etc/passwd"]
    bad += ["/proc/self/environ", f"/proc/self/root{tmp_path}/secret", "/dev/zero", "/dev/stdin"]
    rows = [request(line, images=(Image(path=name),)) for line, name in enumerate([*good, *bad, "pipe"], 1)]
    preparation = made(*rows, path=tmp_path / "trace" / "trace.jsonl")
    assert [prepared.request.line for prepared in preparation.requests] == [1, 2, 3, 4, 5]
    reasons = [drop.reason for drop in preparation.drops]
    assert reasons == ["forbidden_image"] * len(bad) + ["missing_image"]
    assert (
        f"outside of what may be read, {tmp_path}/trace; --media-root allows further folders"
        in preparation.drops[0].problem
    )
    wider = made(*rows[:8], path=tmp_path / "trace" / "trace.jsonl", roots=[tmp_path])
    assert len(wider.requests) == 8


def test_b28_nothing_of_the_kernels_is_an_image_even_where_all_may_be_read(tmp_path: Path) -> None:
    names = ["/proc/self/environ", "/sys/kernel/uevent_seqnum", "/dev/null", "/proc/1/cmdline"]
    rows = [request(line, images=(Image(path=name),)) for line, name in enumerate(names, 1) if Path(name).exists()]
    preparation = made(*rows, path=tmp_path / "trace.jsonl", roots=[Path("/")])
    assert {drop.reason for drop in preparation.drops} == {"forbidden_image"}
    assert not preparation.requests


def test_b28_a_link_that_changes_between_the_look_and_the_opening_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "trace" / "a.jpg").symlink_to("../secret")
    monkeypatch.setattr("os.path.realpath", lambda path, strict=False: str(path))  # as if it had been none by then
    preparation = made(request(images=(Image(path="a.jpg"),)), path=tmp_path / "trace" / "trace.jsonl")
    assert [drop.reason for drop in preparation.drops] == ["forbidden_image"]


def test_given_sizes_and_tokens_are_met_exactly() -> None:
    row = request(images=(Image(width=333, height=77), Image(tokens=24), Image(tokens=6), Image()))
    preparation = made(row)
    first, second, third, fourth = map(size_of, preparation.requests[0].images)
    processor = FakeProcessor()
    assert first == (333, 77)
    assert (processor.rows_for(*second), processor.rows_for(*third)) == (24, 6)
    assert fourth == SizeModel(0).draw(1, 3)
    told = preparation.invented
    assert (told.images_of_given_size, told.images_of_given_tokens, told.images_of_modelled_size) == (1, 2, 1)
    assert told.images_off_their_tokens == 0


def test_tokens_that_no_size_has_are_counted() -> None:
    class Coarse(FakeProcessor):
        def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
            return super().size_for(rows + rows % 2, aspect)

    row = request(images=(Image(tokens=24), Image(tokens=25)))
    preparation = prepare(trace_of(row), load_photos(None), Coarse(), TokenSource(9, [], 0), seed=0)
    assert preparation.invented.images_off_their_tokens == 1


def test_an_image_the_processor_refuses_drops_its_request_alone() -> None:
    rows = [request(1, images=(Image(tokens=24), Image(tokens=200_000))), request(2, images=(Image(tokens=24),))]
    preparation = made(*rows)
    assert [prepared.request.line for prepared in preparation.requests] == [2]
    assert [(drop.line, drop.reason) for drop in preparation.drops] == [(1, "image_size")]


def test_text_is_what_the_images_leave_of_the_context() -> None:
    """The images of the second row need more tokens than its context has: no text, counted."""
    rows = [request(line, context_tokens=tokens, images=(Image(), Image())) for line, tokens in ((1, 9000), (2, 5))]
    preparation = made(*rows)
    rows_of_images = sum(FakeProcessor().rows_for(*SizeModel(0).draw(1, index)) for index in range(2))
    assert preparation.requests[0].text_tokens == 9000 - rows_of_images
    assert preparation.requests[1].text_tokens == 0
    assert preparation.invented.prompts_without_text == 1
    assert preparation.invented.prompts == 1
    assert len(preparation.requests[1].parts(TokenSource(9, [], 0))) == 2
    of_given_size = request(context_tokens=50, images=(Image(tokens=24), Image(width=56, height=84)))
    assert made(of_given_size).requests[0].text_tokens == 50 - 24 - 6


def digest(preparation: Preparation) -> str:
    seen = sha256()
    tokens = TokenSource(1000, [0, 1, 2], 0)
    for prepared in preparation.requests:
        for part in prepared.parts(tokens):
            seen.update(part.encode() if isinstance(part, str) else bytes(part))
    return seen.hexdigest()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    rows = [
        request(line, images=(Image(tokens=24), Image(), Image(width=50, height=60)), text_tokens=9)
        for line in range(1, 6)
    ]
    assert digest(made(*rows)) == digest(made(*rows))
    assert digest(made(*rows)) != digest(made(*rows, seed=1))
    limited, whole = made(*rows[:2]), made(*rows)
    assert [prepared.images for prepared in limited.requests] == [prepared.images for prepared in whole.requests[:2]]


def test_equal_images_are_made_once_and_shared() -> None:
    rows = [request(line, images=(Image(tokens=24),) * 3) for line in range(1, 101)]
    preparation = made(*rows)
    images = [image for prepared in preparation.requests for image in prepared.images]
    assert len(images) == 300
    assert len({id(image) for image in images}) == preparation.invented.different_images == 3  # one a photo


def test_much_work_is_shared_by_fewer_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [request(line, images=(Image(width=100 + line % 10, height=100),)) for line in range(1, 401)]
    assert made(*rows).invented.different_images == 30
    monkeypatch.setattr("tensorferry.replay.workload.prepare.PIXEL_BUDGET", 210_000)
    assert made(*rows).invented.different_images == 20
    monkeypatch.setattr("tensorferry.replay.workload.prepare.PIXEL_BUDGET", 50_000)
    assert made(*rows).invented.different_images == 10
    monkeypatch.setattr("tensorferry.replay.workload.prepare.MAX_PREPARED_PIXELS", 50_000)
    with pytest.raises(PhotoError, match="--limit"):
        made(*rows)


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    made(
        *[request(line, images=(Image(width=line, height=9),)) for line in range(1, 8)],
        progress=lambda *at: seen.append(at),
    )
    assert seen == [(done, 7) for done in range(1, 8)]


# --- prompts -----------------------------------------------------------------------------------------------------


def test_invented_ids_are_in_the_vocabulary_and_never_special() -> None:
    tokens = TokenSource(300, [5, 256, 257, 299], 0)
    ids = tokens.ids(request(), 200_000)
    assert (ids.dtype, ids.shape) == (np.int32, (200_000,))
    assert set(ids.tolist()) == set(range(300)) - {5, 256, 257, 299}
    assert tokens.ids(request(), 1).shape == (1,)


def test_a_vocabulary_of_special_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="all of them special"):
        TokenSource(2, [0, 1], 0)


def test_prompts_differ_by_line_and_repeat_by_seed() -> None:
    prompts = [TokenSource(1000, [], 4).ids(request(line), 600) for line in range(1, 201)]
    assert len({prompt.tobytes() for prompt in prompts}) == 200
    assert np.array_equal(TokenSource(1000, [], 4).ids(request(7), 600), prompts[6])
    assert np.array_equal(TokenSource(1000, [], 4).ids(request(7), 60), prompts[6][:60])
    assert not np.array_equal(TokenSource(1000, [], 5).ids(request(7), 600), prompts[6])


def test_equal_block_ids_are_equal_tokens_and_the_length_is_the_recorded_one() -> None:
    tokens = TokenSource(50_000, [0], 0)
    one = tokens.ids(request(1, blocks=(46, 47, 48), block_tokens=512), 1300)
    two = tokens.ids(request(2, blocks=(46, 47, 99), block_tokens=512), 1536)
    assert (len(one), len(two)) == (1300, 1536)
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.array_equal(one[1024:1300], two[1024:1300])
    short = tokens.ids(request(3, blocks=(46,), block_tokens=512), 2000)
    assert len(short) == 2000  # ids that run out do not cut the prompt
    assert np.array_equal(short[:512], one[:512])


def test_a_long_trace_makes_its_prompts_when_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [request(line, text_tokens=100) for line in range(1, 11)]
    held = made(*rows)
    monkeypatch.setattr("tensorferry.replay.workload.prepare.HELD_TOKENS", 500)
    later = made(*rows)
    assert [prepared.ids is None for prepared in later.requests] == [False] * 5 + [True] * 5
    assert digest(held) == digest(later)


def test_invented_is_nothing_where_all_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    preparation = made(request(text="hello", images=(Image(path="a.jpg"),)), path=tmp_path / "trace.jsonl")
    photos = ["chelsea.jpg", "coffee.jpg", "rocket.jpg"]
    assert preparation.invented == Invented(photos, images_recorded=1, different_images=1, encoded_nbytes=1)


# --- recorded bytes and conversations -----------------------------------------------------------------------------


def test_bytes_in_a_trace_are_sent_as_they_are_and_shared() -> None:
    data = b"\xff\xd8\xff not even a whole JPEG: what becomes of it is a result"
    preparation = made(request(1, images=(Image(data=data),)), request(2, images=(Image(data=data), Image(data=b"x"))))
    assert [prepared.images for prepared in preparation.requests] == [(data,), (data, b"x")]
    assert (preparation.invented.images_recorded, preparation.invented.different_images) == (3, 2)


def test_words_and_images_go_in_their_order() -> None:
    images = (Image(data=b"a"), Image(data=b"b"))
    (prepared,) = made(request(1, layout=("Compare ", 0, " and ", 1), images=images)).requests
    assert prepared.parts(TokenSource(1000, [], 0)) == ["Compare ", b"a", " and ", b"b"]


def test_a_new_turn_alone_gets_the_conversation_in_front() -> None:
    """The prompt of a turn starts with the bytes of the turn before and of its answer, as in a chat."""
    tokens = TokenSource(1000, [0, 1, 2], 0)
    turns = [
        request(1, text_tokens=30, session="s", continues=True, images=(Image(data=b"a"),)),
        request(2, text_tokens=9, session="other", continues=True),
        request(3, text="And now?", session="s", continues=True),
        request(4, text_tokens=5, session="s", continues=True),
        request(5, text_tokens=7, session="s"),  # a whole prompt
    ]
    preparation = made(*turns)
    first, other, second, third, whole = (prepared.parts(tokens) for prepared in preparation.requests)
    assert [len(part) for part in first] == [1, 30]
    assert [len(part) for part in other] == [9]
    assert second[0] == b"a"
    assert np.array_equal(second[1], first[1])
    assert [len(part) for part in second[2:]] == [1, len("And now?")]  # the answer has one token
    assert [len(part) for part in third] == [1, 30, 1, 8, 1, 5]
    assert np.array_equal(third[2], second[2])
    assert not np.array_equal(third[2], third[4])
    assert [len(part) for part in whole] == [7]
    assert preparation.invented.answers == 2


def test_turns_of_one_line_do_not_share_what_is_invented() -> None:
    first, second = made(request(1, text_tokens=30), request(1, turn=1, text_tokens=30)).requests
    assert not np.array_equal(first.ids, second.ids)

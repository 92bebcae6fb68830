"""Images that a trace only counts get measured sizes with their frequencies, the same ones every time."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from PIL import Image as Pillow

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import Image
from tensorferry.replay.trace.loaded_trace import load
from tensorferry.replay.trace.trace_file import Recording
from tensorferry.replay.workload.image_models import Measured, image_model
from tensorferry.replay.workload.photos import load_photos
from tensorferry.replay.workload.prepare import Preparation, prepare
from tensorferry.replay.workload.token_ids import TokenSource

DATA = Path(__file__).parents[2] / "data" / "traces"
PX = 28


class Processor:
    """A token is 28 x 28 pixels."""

    def rows_for(self, width: int, height: int) -> int:
        return max(1, width // PX) * max(1, height // PX)

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        return rows * PX, PX


def prepared(spec: str, *, seed: int = 0) -> Preparation:
    trace = load(Recording(DATA / "azure_lmm.csv"))
    tokens, model = TokenSource(1000, [], seed), image_model(spec, seed)
    return prepare(trace, load_photos(None), Processor(), tokens, seed=seed, model=model)


def sizes(preparation: Preparation) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for request in preparation.requests:
        for data in request.images:
            with Pillow.open(io.BytesIO(data)) as image:
                found[image.size] += 1
    return found


def test_coco_has_the_sizes_of_its_photos() -> None:
    model = image_model("coco", 0)
    drawn = [model.image(line, 0) for line in range(20_000)]
    often = Counter((image.width, image.height) for image in drawn)
    assert often.most_common(2)[0][0] == (640, 480)
    assert 0.21 < often[640, 480] / 20_000 < 0.24  # 4,541 of 20,288
    assert max(max(size) for size in often) == 640
    assert median(image.width for image in drawn) == 640


def test_a_fixed_size_is_width_and_then_height() -> None:
    assert sizes(prepared("300x200")) == {(300, 200): 22}
    assert prepared("300x200").invented.image_model == "300x200"


def test_a_file_of_sizes_is_drawn_from_by_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "sizes"
    path.write_text("\ufeffHeight;Width;Camera\n40;30;a\n40;30;b\n40;30;c\n20;10;d\n\n")
    model = image_model(str(path), 5)
    drawn = Counter(model.image(line, 0) for line in range(4000))
    assert set(drawn) == {Image(width=30, height=40), Image(width=10, height=20)}
    assert 2850 < drawn[Image(width=30, height=40)] < 3150
    path.write_text("width,height,count\n30,40,1\n10,20,0\n")
    assert sizes(prepared(str(path))) == {(30, 40): 22}


def test_another_traces_tokens_are_turned_into_sizes_by_the_processor() -> None:
    """Its images have 4 to 1,196 tokens; so have these, each of a size that makes exactly so many."""
    preparation = prepared(str(DATA / "servegen.jsonl"))
    wanted = {image.tokens for request in load(Recording(DATA / "servegen.jsonl")).requests for image in request.images}
    found = sizes(preparation)
    assert found.total() == 22
    assert {Processor().rows_for(*size) for size in found} <= wanted
    invented = preparation.invented
    assert (invented.images_of_modelled_size, invented.images_of_given_tokens) == (22, 0)
    assert invented.image_model == "servegen.jsonl"


def test_text_gets_what_the_modelled_images_leave() -> None:
    preparation = prepared("280x280")  # 100 tokens each
    by_line = {request.request.line: request.text_tokens for request in preparation.requests}
    assert by_line[3] == 949 - 100
    assert by_line[7] == 4564 - 1600


def test_a_draw_depends_on_seed_place_and_index_alone() -> None:
    assert image_model("coco", 5).image(17, 2) == image_model("coco", 5).image(17, 2)
    draws = {image_model("coco", seed).image(place, i) for seed in (1, 2) for place in (1, "1.1") for i in (0, 1)}
    assert len(draws) > 4
    assert prepared("coco").payload_sha256 == prepared("coco").payload_sha256 != prepared("coco", seed=1).payload_sha256


def test_pictures_are_photos_and_no_noise() -> None:
    """Noise of that size at that quality has more than 1.5 bytes a pixel."""
    for request in prepared("coco").requests:
        for data in request.images:
            with Pillow.open(io.BytesIO(data)) as image:
                assert len(data) < image.width * image.height * 0.6


def test_the_default_is_the_published_distribution() -> None:
    trace = load(Recording(DATA / "azure_lmm.csv"))
    plain = prepare(trace, load_photos(None), Processor(), TokenSource(1000, [], 0), seed=0)
    assert plain.payload_sha256 == prepared("modserve").payload_sha256
    assert plain.invented.image_model == "modserve"


@pytest.mark.parametrize("spec", ["", "imagenet", "640", "0x5", "70000x1", "60000x60000", "absent.csv"])
def test_what_is_no_model_is_said(spec: str) -> None:
    with pytest.raises(ValueError, match=r"neither modserve|sides of 1"):
        image_model(spec, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("width,height\n0,5\n", ":2: width is 0"),
        ("width,height\n3,x\n", ":2: height is 'x'"),
        ("width,height\n3,4\n3\n", ":3: 1 fields"),
        ("width,height\n60000,60000\n", ":2: 60000 x 60000 pixels"),
        ("width,height,count\n3,4,0\n", "no size with a count above 0"),
        ("width,height\n", "no size with a count above 0"),
        (json.dumps({"at_ms": 1, "images": 3, "output_tokens": 1}), "no image of a known size"),
        ("hello", "neither a trace"),
    ],
)
def test_a_file_that_is_no_model_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "model"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        image_model(str(path), 0)
    assert said in str(caught.value)


def test_counts_decide() -> None:
    model = Measured("two", {Image(width=1, height=1): 1, Image(width=2, height=2): 3}, 0)
    drawn = Counter(model.image(place, 0).width for place in range(4000))
    assert 2850 < drawn[2] < 3150

"""What `tests/corpus` keeps, and more of its kind: whatever comes in is taken, or refused by an error that says why."""

from __future__ import annotations

import importlib.util
import json
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from benchmarks.damage import damaged
from benchmarks.malformed import MUTATIONS, Layer, layer_of, samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorferry.codecs.errors import BadMessage, ConfigError, FerryError, TraceError
from tensorferry.codecs.frames import Limits, decode, encode, open_inline
from tensorferry.codecs.messages import Inline
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.registry import make_processor

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
MOST_NBYTES = 512 << 10  #: most of it one message of 4,097 items, each of which has a content hash
LAYERS = {layer.name.lower(): layer for layer in Layer}

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_corpus", CORPUS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(folder: str) -> list[Any]:
    return [pytest.param(path, id=path.name) for path in sorted((CORPUS / folder).iterdir())]


def kept_messages() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CORPUS / "messages.json").read_text("ascii"))
    return found


def test_the_corpus_is_up_to_date_and_small() -> None:
    there = {str(path.relative_to(CORPUS)): path.read_bytes() for path in CORPUS.rglob("*.*") if path.suffix != ".py"}
    there = {name: data for name, data in there.items() if "__pycache__" not in name}
    files: dict[str, bytes] = made().files()
    assert there == files, "PYTHONPATH=. python tests/corpus/make.py"
    assert sum(map(len, files.values())) <= MOST_NBYTES


# --- messages -----------------------------------------------------------------------------------------------------


def taken_or_refused(frames: tuple[bytes, ...]) -> None:
    """By the codec alone. What it takes is what was sent, and its payloads open, or say why not."""
    try:
        message, inline = decode(frames, Limits())
    except BadMessage:
        return
    again, _ = decode(encode(message, inline), Limits())
    assert repr(again) == repr(message), "not a number is not equal to itself"
    for payload in inline_payloads(message):
        with suppress(FerryError):
            open_inline(payload, inline)


def inline_payloads(value: Any) -> list[Inline]:
    if isinstance(value, Inline):
        return [value]
    if isinstance(value, tuple):
        return [found for inner in value for found in inline_payloads(inner)]
    fields = getattr(value, "__struct_fields__", ())
    return [found for name in fields for found in inline_payloads(getattr(value, name))]


@pytest.mark.parametrize("kept", kept_messages(), ids=lambda kept: kept["name"])
def test_a_message_of_the_corpus_gets_as_far_as_it_did(kept: dict[str, Any]) -> None:
    frames = tuple(map(bytes.fromhex, kept["frames"]))
    assert layer_of(frames, Limits()) is LAYERS[kept["layer"]]
    taken_or_refused(frames)


@pytest.mark.slow
@quick
@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_b27_whatever_is_done_to_a_message_it_is_taken_or_refused(rng: Random, data: st.DataObject) -> None:
    mutations = sorted({one for those in MUTATIONS.values() for one in those}, key=lambda one: one.__name__)
    mutation = data.draw(st.sampled_from(mutations))
    sample = data.draw(st.sampled_from(samples()))
    taken_or_refused(mutation(rng, sample, samples()))


# --- deployment files ---------------------------------------------------------------------------------------------


def loads_or_says_why(path: Path) -> bool:
    try:
        assert isinstance(load(path), Deployment)
    except ConfigError as problem:
        said = str(problem)
    else:
        return True
    assert str(path) in said
    return False


@pytest.mark.parametrize("path", kept("configs"))
def test_b31_a_deployment_file_of_the_corpus_is_refused(path: Path) -> None:
    assert not loads_or_says_why(path)


@pytest.mark.slow
@quick
@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_a_deployment_file_that_is_damaged_loads_or_is_refused(
    tmp_path: Path, rng: Random, data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from(sorted((ROOT / "configs").glob("*.yaml")))).read_bytes()
    path = tmp_path / "deployment.yaml"
    path.write_bytes(damaged(rng, whole))
    loads_or_says_why(path)


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", kept("traces"))
def test_a_trace_of_the_corpus_is_refused_or_has_drops(path: Path) -> None:
    try:
        said = [drop.problem for drop in read_trace(path).drops]
    except TraceError as problem:
        said = [str(problem)]
    assert said
    assert all(said)


# --- images -------------------------------------------------------------------------------------------------------


def decodes_or_says_why(image: bytes, processor: Any) -> None:
    """At a price that is bounded by its header."""
    with suppress(BadMedia), warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = processor.plan(image)
        out = View.empty(plan.dtype, plan.shape)
        processor.write(image, plan, out)


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor("qwen2-vl", {}, LimitsSpec(item_pixels=1_000_000))


@pytest.mark.parametrize("path", kept("images"))
def test_an_image_of_the_corpus_decodes_or_is_refused(path: Path, processor: Any) -> None:
    decodes_or_says_why(path.read_bytes(), processor)


@pytest.mark.parametrize(
    "name",
    ["tiny_20x20.jpg", "pixel_1x1.png", "camera_1bit.png", "rocket_anim.gif", "coffee.avif", "coffee_lossy.webp"],
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rng=st.randoms(use_true_random=False))
def test_an_image_that_is_damaged_decodes_or_is_refused(rng: Random, name: str, processor: Any) -> None:
    folders = (ROOT / "tests" / "data" / "images", ROOT / "examples" / "images")
    image = next(folder / name for folder in folders if (folder / name).exists()).read_bytes()
    decodes_or_says_why(damaged(rng, image), processor)

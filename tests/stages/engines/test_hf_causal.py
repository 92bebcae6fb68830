"""The hf-causal engine: the tokens that transformers itself generates, and image to text through a whole deployment."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, ConfigError
from tensorferry.codecs.tensors import View, view_of
from tensorferry.pipeline.client.client import Client, Part
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, SchedulerSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages import plugin
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.adapters.registry import make_adapter
from tensorferry.stages.engines import registry
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.scheduler.answer import Answer
from tensorferry.stages.tokenizer.text import Rows, TextEncoder

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

SMALL = {"width": 64, "depth": 2, "heads": 4}


def make(**options: Any) -> Any:
    return registry.make_engine(SchedulerSpec(engine="hf-causal", options={**SMALL, **options}))


def request_of(ids: Sequence[int], *images: tuple[int, torch.Tensor], output_tokens: int = 6) -> EngineRequest:
    """images: each with the offset of its first placeholder."""
    spans = [(offset, len(rows)) for offset, rows in images]
    embeddings = [{"embeddings": view_of(rows), "deepstack": view_of(rows)} for _, rows in images]
    return EngineRequest(bytes(16), np.array(ids, np.int32), spans, embeddings, output_tokens)


def rows_of(count: int, seed: int, width: int = 64) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def generated(model: Any, request: EngineRequest) -> tuple[int, ...]:
    """What transformers' own `generate` answers."""
    prompt = model.get_input_embeddings()(torch.tensor(request.token_ids, dtype=torch.long))
    for (offset, length), outputs in zip(request.spans, request.embeddings, strict=True):
        prompt[offset : offset + length] = outputs["embeddings"].torch().to(prompt.dtype)
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    tokens = model.generate(
        inputs_embeds=prompt[None], attention_mask=mask, max_new_tokens=request.output_tokens, do_sample=False
    )
    return tuple(tokens[0].tolist())


# --- numbers ----------------------------------------------------------------------------------------------


async def test_answers_are_those_of_generate() -> None:
    engine = make(seed=4)
    batch = [
        request_of([1, 2, 3, 7, 7, 7, 4], (3, rows_of(3, 0))),
        request_of([1, 2, 3, 7, 7, 7, 4], (3, rows_of(3, 1))),
        request_of([7, 7, 5, 7, 6], (0, rows_of(2, 2)), (3, rows_of(1, 3)), output_tokens=9),
        request_of([5], output_tokens=1),
        request_of([5], output_tokens=0),
    ]
    answers = await engine.run(batch)
    expected = [generated(engine.model, request) if request.output_tokens else () for request in batch]
    assert answers == [EngineResult(len(tokens), token_ids=tokens) for tokens in expected]
    assert answers[0] != answers[1], "the answer does not depend on the image"
    assert len(answers[2].token_ids) == 9


async def test_bfloat16_embeddings_are_taken_as_they_are() -> None:
    engine = make(dtype="bfloat16")
    request = request_of([7, 7, 1], (0, rows_of(2, 0).bfloat16()))
    (answer,) = await engine.run([request])
    assert answer.token_ids == generated(engine.model, request)


async def test_a_model_of_a_local_directory_that_ends_its_answers(tmp_path: Path) -> None:
    first = make(seed=4)
    request = request_of([1, 2, 3], output_tokens=8)
    tokens = generated(first.model, request)
    first.model.generation_config.eos_token_id = [511, tokens[2]]
    first.model.save_pretrained(tmp_path)
    (answer,) = await make(path=str(tmp_path)).run([request])
    end = tokens.index(tokens[2]) + 1
    assert answer == EngineResult(end, token_ids=tokens[:end])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory of the small model."""
    make(seed=4).model.save_pretrained(tmp_path)
    return tmp_path


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop(UP), f"lacks tensor {UP}; name a whole checkpoint"),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if name != UP],
            "down_proj.weight, .* and 18 more",
        ),
        (lambda weights: weights.update(more=torch.zeros(2)), "has the unknown tensor more; name a whole checkpoint"),
        (
            lambda weights: weights.update({UP: torch.zeros(3, 5)}),
            rf"has tensor {UP} of shape \(3, 5\), not \(256, 64\)",
        ),
        (lambda weights: weights[UP][0].fill_(torch.nan), f"has NaN or infinity in tensor {UP}"),
        (lambda weights: weights[UP][0].fill_(-torch.inf), f"has NaN or infinity in tensor {UP}"),
    ],
    ids=["one missing", "nearly all missing", "unknown", "shape", "NaN", "infinity"],
)
def test_weights_that_are_not_the_models_are_named(saved: Path, change: Callable[[Any], object], said: str) -> None:
    weights = load_file(saved / "model.safetensors")
    change(weights)
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    refused(saved, said)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 3, "layer_types": None}, r"lacks tensor model\.layers\.2\..* and 4 more"),
        ({"num_hidden_layers": 1, "layer_types": None}, r"has the unknown tensor model\.layers\.1\..* and 4 more"),
        ({"model_type": "bert"}, r"as a BertLMHeadModel, lacks tensor bert\..*has the unknown tensor lm_head\.weight"),
    ],
    ids=["a layer more", "a layer less", "another model"],
)
def test_weights_of_another_configuration_are_named(saved: Path, values: dict[str, Any], said: str) -> None:
    configure(saved, values)
    refused(saved, said)


def test_a_broken_file_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    make(seed=4).model.save_pretrained(tmp_path, max_shard_size="200KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    refused(tmp_path, f"{re.escape(shard.name)}: Error while deserializing header.*; fetch the file again")


async def test_tied_weights_are_not_missed(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    request = request_of([1, 2, 3])
    expected = EngineResult(6, token_ids=generated(model, request))
    assert await make(path=str(tmp_path)).run([request]) == [expected]
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}  # as some checkpoints have it
    save_file(twice, tmp_path / "model.safetensors", {"format": "pt"})
    assert await make(path=str(tmp_path)).run([request]) == [expected]


def test_what_a_models_class_leaves_out_is_not_unknown(tmp_path: Path) -> None:
    """The vision tower of a whole checkpoint, where transformers has a language model for it."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, layer_types=["full_attention"], eos_token_id=None,
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.visual.more": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    make(path=str(tmp_path))
    save_file({**weights, "model.audio.more": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    refused(tmp_path, r"unknown tensor model\.audio\.more")


@pytest.mark.parametrize("model_type", ["unheard_of", "qwen2"])
def test_no_code_of_a_checkpoint_runs(saved: Path, model_type: str) -> None:
    trace = saved / "it ran"
    (saved / "own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import Qwen2Config as Config, Qwen2ForCausalLM as Model\n"
    )
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(saved, {"auto_map": classes, "model_type": model_type})
    if model_type == "qwen2":
        make(path=str(saved))  # transformers' own class serves
    else:
        refused(saved, "code of its own, which never runs here; name one of a model that transformers has")
    assert not trace.exists()


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}


def save(folder: Path, kind: str, config: str, values: dict[str, Any]) -> None:
    """A checkpoint of another family of transformers, with random weights."""
    import transformers

    getattr(transformers, kind)(getattr(transformers, config)(**values)).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "values", "said"),
    [
        (
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            {
                "text_config": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
                "vision_config": {**SIZES, "image_size": 28, "patch_size": 14},
            },
            r"model_type 'gemma3': its language model's configuration is nested in another's \(text_config\); ",
        ),
        (
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2_5_VLConfig",
            {
                "text_config": {**SIZES, "num_key_value_heads": 2},
                "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
            },
            "ValueError: transformers has no causal language model for its config.json; name a plain",
        ),
        (
            "BloomForCausalLM",
            "BloomConfig",
            {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2},
            "model_type 'bloom', and its configuration lacks max_position_embeddings, how long a prompt may be; name",
        ),
        (
            "MambaForCausalLM",
            "MambaConfig",
            {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64},
            "as a MambaForCausalLM, cannot go from embeddings to tokens, step by step: ",
        ),
        ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "max_position_embeddings": 0}, "says 0 for max_position_emb"),
    ],
    ids=["nested", "no_language_model", "no_length", "mamba", "zero"],
)
def test_a_model_that_can_never_run_is_refused_at_the_start(
    tmp_path: Path, kind: str, config: str, values: dict[str, Any], said: str
) -> None:
    if values.get("max_position_embeddings") == 0:
        save(tmp_path, kind, config, {**values, "max_position_embeddings": 64})
        configure(tmp_path, {"max_position_embeddings": 0})
    else:
        save(tmp_path, kind, config, values)
    refused(tmp_path, said)


@pytest.mark.parametrize(
    ("kind", "config", "values"),
    [("GPT2LMHeadModel", "GPT2Config", GPT2), ("LlamaForCausalLM", "LlamaConfig", SIZES)],
)
async def test_models_that_call_their_sizes_otherwise_run(
    tmp_path: Path, kind: str, config: str, values: dict[str, Any]
) -> None:
    save(tmp_path, kind, config, {**values, "eos_token_id": None})
    (answer,) = await make(path=str(tmp_path)).run([request_of([1, 2, 3])])
    assert isinstance(answer, EngineResult)
    assert answer.output_tokens == 6


def configure(folder: Path, values: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def refused(folder: Path, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(folder))}.*{said}") as caught:
        make(path=str(folder))
    assert caught.value.key == "scheduler.options.path"


async def test_a_request_that_does_not_fit_fails_alone() -> None:
    engine = make(vocabulary=300)
    good = request_of([1, 2])
    bad = {
        "vocabulary has 300": request_of([1, 300]),
        "is 64 wide": request_of([7, 7], (0, rows_of(2, 0, width=32))),
        "the prompt is empty": request_of([]),
        "context, 32768": request_of([1] * 32760, output_tokens=9),
    }
    answers = await engine.run([good, *bad.values(), good])
    assert answers[0] == answers[-1]
    assert isinstance(answers[0], EngineResult)
    for problem, answer in zip(bad, answers[1:-1], strict=True):
        assert isinstance(answer, BadRequest)
        assert problem in str(answer)


async def test_a_cancelled_batch_stops_at_the_next_token() -> None:
    engine = make()
    begun, forward = Event(), engine.model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return forward(*args, **kwargs)

    engine.model.forward = noted
    async with asyncio.timeout(30):
        task = asyncio.create_task(engine.run([request_of([1], output_tokens=30_000)]))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (answer,) = await engine.run([request_of([1], output_tokens=1)])  # in the same thread, once that is free
    assert answer.output_tokens == 1


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"width": 60, "heads": 4}, "scheduler.options", "even multiple of heads, 4"),
        ({"path": "Qwen/Qwen2-7B"}, "scheduler.options.path", "is not a directory"),
        ({"path": "."}, "scheduler.options.path", "cannot read model.safetensors"),
        ({"temperature": 0.5}, "scheduler.options.temperature", "hf-causal has: depth, dtype, heads"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], key: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.key == key
    assert problem in caught.value.problem


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hf-causal needs transformers; install it with: pip install"):
        make()


@pytest.mark.parametrize("token_ids", [(1 << 31,), ("a",), ((1, 2), (3, 4)), (0,) * ((1 << 20) + 1)])
def test_token_ids_that_cannot_travel_are_an_error(token_ids: Any) -> None:
    with pytest.raises(ValueError, match="the engine answered with token ids"):
        Answer.whole(EngineResult(1, token_ids=token_ids), 0)
    assert Answer.whole(EngineResult(2, token_ids=(1, 65535)), 0).token_ids == b"\x01\0\0\0\xff\xff\0\0"


# --- end to end -------------------------------------------------------------------------------------------

DEPLOYMENT = """
name: image-to-text-test
transport: shm
runtime_dir: {runtime_dir}
model: {{adapter: qwen3-vl, seed: 1, options: {{tiny: true, dtype: float32}}}}
tokenizer: {{processor: qwen2-vl, threads: 1, options: {{patch_size: 16, min_pixels: 1024, max_pixels: 65536}}}}
scheduler: {{engine: hf-causal, options: {{width: 64, seed: 4}}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.5}}
telemetry: {{log_level: warning}}
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[Client]:
    deployment = load(file)
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=90.0) as client:
        yield client


def photo(seed: int) -> bytes:
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    with io.BytesIO() as file:
        coarse.resize((130, 90), Image.Resampling.BILINEAR).save(file, "PNG")
        return file.getvalue()


def answered_here(deployment: Deployment, parts: Sequence[Part], output_tokens: int) -> tuple[int, ...]:
    """The same request through the same parts, without the pipeline; by transformers' own `generate`."""
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    text = TextEncoder.from_file(None)
    pixels: dict[int, View] = {}
    items: list[ItemInfo] = []
    pieces: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(text.encode(part))
            continue
        assert isinstance(part, bytes)
        plan = processor.plan(part)
        pixels[len(items)] = out = View.empty(plan.dtype, plan.shape)
        digest = processor.write(part, plan, out)
        items.append(ItemInfo(len(items), plan.modality, plan.grid, plan.patches, plan.rows, digest))
        pieces.append(Rows(plan.rows))
    ids, spans = text.assemble(pieces)
    outputs: dict[int, View] = {}

    def out(index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        view = View.empty(dtype, shape)
        if name == "embeddings":
            outputs[index] = view
        return view

    adapter = make_adapter(deployment.model, 1)
    for item in items:
        adapter.encode([item], lambda indices: pixels[indices[0]], out)
    embeddings = [{"embeddings": outputs[index]} for index in range(len(items))]
    engine: Any = registry.make_engine(deployment.scheduler)
    return generated(engine.model, EngineRequest(bytes(16), ids, spans, embeddings, output_tokens))


@pytest.mark.processes
@pytest.mark.timeout(180)
async def test_image_to_text_through_a_whole_deployment(tmp_path: Path, short_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(runtime_dir=short_path / "run"))
    requests: list[list[Part]] = [
        ["What is this? ", photo(1), " Be brief."],
        ["What is this? ", photo(2), " Be brief."],
        [photo(1), " or ", photo(2), "?"],
        ["no image at all"],
    ]
    async with running(file) as client:
        outcomes = await asyncio.gather(
            *(client.submit(parts, output_tokens=12, deadline_s=60.0) for parts in requests)
        )
    answers = []
    for parts, outcome in zip(requests, outcomes, strict=True):
        assert isinstance(outcome, wire.Result), outcome
        answers.append(tuple(np.frombuffer(outcome.token_ids, "<i4").tolist()))
        assert outcome.output_tokens == len(answers[-1])
        assert answers[-1] == answered_here(load(file), parts, 12)
    assert len(set(answers)) == len(answers), "answers do not depend on what was asked"

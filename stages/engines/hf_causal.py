"""A causal language model of the transformers library as an engine: prompts with spliced embeddings in, tokens out.

Greedy, one request after the other: small and correct, so that a deployment answers end to end. It does not
serve large models: servers of these batch, page their caches and stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tensorferry.codecs.errors import BadRequest, RequestError
from tensorferry.stages.engines.base import EngineRequest, EngineResult, Options
from tensorferry.stages.engines.options import HfCausalOptions
from tensorferry.stages.plugin import bad_config, read_options
from tensorferry.stages.weights import differences, listed, read_headers, seeded_weights, tensor_files

_PATH = "scheduler.options.path"
_REMEDY = "name a plain causal language model, such as qwen2, llama or mistral"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HfCausal:
    """Answers with as many tokens as were asked for, or fewer if the model ends its answer.

    Of an item's outputs it takes `embeddings`, one row for each placeholder, as wide as the model; others, such as
    Qwen3-VL's `deepstack`, have no place in a plain language model.
    """

    def __init__(self, options: Options) -> None:
        """options: those of HfCausalOptions. Raises ConfigError naming one that is wrong, or the path."""
        self._options = read_options("scheduler.options", "hf-causal", HfCausalOptions, options)
        self._model: Any = _model(self._options)
        self._ends = _ends(self._model)
        self._thread = ThreadPoolExecutor(1, "generate")  # one: a batch that was given up ends before the next begins

    @property
    def model(self) -> Any:
        """transformers' model, for comparison."""
        return self._model

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        """One answer per request, or the RequestError in its place: a token id outside the vocabulary, a prompt longer
        than the model's context, embeddings of another width. Cancelled, it stops at the next token."""
        stop = Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answers, batch, stop)
        finally:
            stop.set()

    def _answers(self, batch: Sequence[EngineRequest], stop: Event) -> Sequence[EngineResult | Exception]:
        answers: list[EngineResult | Exception] = []
        for request in batch:
            try:
                answers.append(self._answer(request, stop))
            except RequestError as problem:
                answers.append(problem)
        return answers

    @torch.inference_mode()
    def _answer(self, request: EngineRequest, stop: Event) -> EngineResult:
        tokens: list[int] = []
        step: dict[str, Any] = {"inputs_embeds": self._spliced(request)}
        cache = None
        while len(tokens) < request.output_tokens and not stop.is_set():
            best, cache = _step(self._model, cache, **step)
            tokens.append(int(best))
            if tokens[-1] in self._ends:
                break
            step = {"input_ids": best}
        return EngineResult(len(tokens), token_ids=tuple(tokens))

    def _spliced(self, request: EngineRequest) -> torch.Tensor:
        """The prompt as embeddings, (1, tokens, width), items' rows in place of their placeholders."""
        config, ids = self._model.config, torch.from_numpy(request.token_ids.astype("int64"))
        if not len(ids):
            raise BadRequest("the prompt is empty; a language model needs at least one token")
        if int(ids.max()) >= config.vocab_size or int(ids.min()) < 0:
            raise BadRequest(
                f"the prompt has token ids {int(ids.min())} to {int(ids.max())}; the language model's vocabulary has "
                f"{config.vocab_size}"
            )
        most = config.max_position_embeddings
        if len(ids) + request.output_tokens > most:
            raise BadRequest(
                f"{len(ids)} prompt tokens and {request.output_tokens} output tokens exceed the model's context, {most}"
            )
        images = [outputs["embeddings"].torch() for outputs in request.embeddings]
        if images and images[0].device != self._model.device:
            self._model.to(images[0].device)
        prompt: torch.Tensor = self._model.get_input_embeddings()(ids.to(self._model.device))
        for index, ((offset, length), rows) in enumerate(zip(request.spans, images, strict=True)):
            if rows.shape != (length, prompt.shape[1]) or not rows.is_floating_point():
                raise BadRequest(
                    f"item {index} has embeddings of {rows.dtype} {tuple(rows.shape)}; the language model is "
                    f"{prompt.shape[1]} wide"
                )
            prompt[offset : offset + length] = rows.to(prompt.dtype)
        return prompt.unsqueeze(0)


def _model(options: HfCausalOptions) -> Any:
    """The model of a local directory, or a small one of Qwen2's architecture with seeded weights."""
    dtype = _DTYPES[options.dtype]
    if options.path is not None:
        return _read(options.path, dtype)
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).eval()
    weights = seeded_weights(
        {name: tuple(t.shape) for name, t in model.state_dict().items()}, options.seed, "scheduler.options"
    )
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    return model


def _read(path: str, dtype: torch.dtype) -> Any:
    """The model of a local directory, all of its weights from there. Raises ConfigError: transformers would make those
    that are missing at random, and leave out those that it has no place for."""
    folder = Path(path)
    if not folder.is_dir():  # transformers would look for it on the network
        raise bad_config(_PATH, f"{path} is not a directory; name one with config.json and safetensors")
    read_headers(_PATH, tensor_files(_PATH, folder))  # a file that is broken, by its name
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by their names
            output_loading_info=True,
        )
    except Exception as problem:  # whatever a file that is not right leads it to
        text = " ".join(str(problem).split())[:500]
        if "trust_remote_code" in text:  # its remedy is none here
            text = "its model is code of its own, which never runs here; name one of a model that transformers has"
        elif "Unrecognized configuration class" in text:  # and then the names of a hundred others
            text = f"transformers has no causal language model for its config.json; {_REMEDY}"
        raise bad_config(_PATH, f"{path}: {type(problem).__name__}: {text}") from problem
    _check_config(path, model.config)
    # Tied weights are not among the missing, nor among the unknown what the model's class knows to leave out.
    shapes = {name: (tuple(given), tuple(wanted)) for name, given, wanted in found["mismatched_keys"]}
    if differing := differences(found["missing_keys"], found["unexpected_keys"], shapes):
        remedy = "name a whole checkpoint with the config.json that it came with"
        raise bad_config(_PATH, f"{path}, as a {type(model).__name__}, {differing}; {remedy}")
    if broken := {name for name, tensor in model.state_dict().items() if not _is_finite(tensor)}:
        raise bad_config(_PATH, f"{path} has NaN or infinity in tensor {listed(broken)}; fetch its files again")
    _try(path, model.eval())
    return model


def _check_config(path: str, config: Any) -> None:
    """Raises ConfigError for a model that no request could be run with, by what its configuration has to say."""
    kind = f"{path} is of model_type {config.model_type!r}"
    if config.get_text_config() is not config:
        inner = "its language model's configuration is nested in another's (text_config)"
        raise bad_config(_PATH, f"{kind}: {inner}; {_REMEDY}, or the checkpoint of its language model alone")
    if config.is_encoder_decoder:
        raise bad_config(_PATH, f"{kind}, which has an encoder and a decoder; {_REMEDY}")
    for name, what in (
        ("vocab_size", "which token ids there are"),
        ("hidden_size", "how wide embeddings are"),
        ("max_position_embeddings", "how long a prompt may be"),
    ):
        number = getattr(config, name, None)
        if type(number) is not int or number < 1:
            given = "lacks" if number is None else f"says {number!r} for"
            raise bad_config(_PATH, f"{kind}, and its configuration {given} {name}, {what}; {_REMEDY}")


@torch.inference_mode()
def _try(path: str, model: Any) -> None:
    """Two steps as `HfCausal` takes them. Raises ConfigError where the model cannot be run in this way at all."""
    try:
        prompt = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64))
        if prompt.shape != (1, 1, model.config.hidden_size):
            raise ValueError(f"a token's embedding has shape {tuple(prompt.shape)[2:]}")
        best, cache = _step(model, None, inputs_embeds=prompt)
        if cache is None:
            raise ValueError("it keeps no cache of what it has read")
        _step(model, cache, input_ids=best)
    except Exception as problem:  # whatever a model without one of these arguments leads it to
        text = " ".join(str(problem).split())[:300]
        reason = f"cannot go from embeddings to tokens, step by step: {type(problem).__name__}: {text}"
        raise bad_config(_PATH, f"{path}, as a {type(model).__name__}, {reason}; {_REMEDY}") from problem


def _step(model: Any, cache: Any, **given: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """One token more, (1, 1), and the cache that has all before it."""
    output = model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1:].argmax(dim=-1), output.past_key_values


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() and tensor.itemsize == 1:  # of a quantised model; torch cannot look through all kinds
        tensor = tensor.float()
    return bool(tensor.isfinite().all())


def _ends(model: Any) -> frozenset[int]:
    """The tokens with which an answer is over."""
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)

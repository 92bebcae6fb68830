"""The table of the formats that replay reads: how each is recognised and read.

Formats are tried in this order. Qwen-Bailian's keys contain Mooncake's, but it has seconds instead of milliseconds and
16 tokens a block instead of 512, so it comes first. The same holds for RAGPulse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tensorferry.replay.trace.exact_numbers import NS
from tensorferry.replay.trace.formats.aiperf import Mooncake, MultiTurn, SingleTurn
from tensorferry.replay.trace.formats.base import Format
from tensorferry.replay.trace.formats.captures import CustomImage, Dynamo, OpenAIBatch, SageMaker
from tensorferry.replay.trace.formats.columns import Columns
from tensorferry.replay.trace.formats.own import Own
from tensorferry.replay.trace.formats.servegen import ServeGen
from tensorferry.replay.trace.formats.times import Times
from tensorferry.replay.trace.formats.token_counts import Keys, LengthRows

_MS_NS = NS // 1000

#: github.com/Azure/AzurePublicDataset, CC-BY-4.0. In the LMM trace ContextTokens counts text and image tokens together,
#: and NumImages is its only fact about images.
AZURE_LLM = Columns("azure-llm", "ContextTokens", time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens")
AZURE_LMM = msgspec.structs.replace(AZURE_LLM, name="azure-lmm", known_by="NumImages", images="NumImages")
#: github.com/HPMLL/BurstGPT, CC-BY-4.0. Its first two files have six columns. The third has two more in front, and
#: starts after 225 days. API rows have no session. A response of no tokens was a failure.
BURSTGPT = Columns(
    "burstgpt",
    "Request tokens",
    time="Timestamp",
    prompt="Request tokens",
    output="Response tokens",
    unit_ns=NS,
    session="Session ID",
    took_s="Elapsed time",
)
#: github.com/microsoft/vidur, MIT.
VIDUR = Columns(
    "vidur", "arrived_at", time="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens", unit_ns=NS
)
CSV = (AZURE_LMM, AZURE_LLM, BURSTGPT, VIDUR)

#: github.com/kvcache-ai/Mooncake: milliseconds, an identity for each 512 tokens.
MOONCAKE = Keys("mooncake", _MS_NS, 512)
#: github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0: seconds, an identity for each 16 tokens. It only
#: says that a request had images, so one is assumed.
BAILIAN = Keys("qwen-bailian", NS, 16, id="chat_id", parent="parent_chat_id", image_flag="type")
#: github.com/flashserve/RAGPulse, MIT: seconds, in strings. Most blocks have 512 tokens; the trace does not say which.
RAGPULSE = Keys("ragpulse", NS, 512, session="session_id")


class Lines(msgspec.Struct, frozen=True):
    """A format of one JSON object a line."""

    name: str
    knows: Callable[[dict[str, Any]], bool]  #: of any one row
    read: Callable[[Times | None], Format]
    times: Times | None = None  #: None: rows have no times, unless they have OpenAI's `created`
    optional: bool = False  #: whether all rows together may leave out their times
    decides: bool = True  #: whether the unit is only usual, so that the numbers may show another one


def _has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


def _inside(key: str, *keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: isinstance(row.get(key), dict) and any(inner in row[key] for inner in keys)


def _any(*keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: any(key in row for key in keys)


_S, _MS = Times("timestamp", NS), Times("timestamp", _MS_NS)
JSON = (
    Lines("tensorferry", _has("at_ms"), Own, Times("at_ms", _MS_NS, spelt=False), decides=False),
    Lines("sagemaker", _has("captureData"), SageMaker, Times("eventMetadata.inferenceTime", None, True)),
    Lines(
        "dynamo",
        _inside("event", "schema"),
        Dynamo,
        Times("event.request.request_received_ms", _MS_NS, True, spelt=False),
        decides=False,
    ),
    Lines("qwen-bailian", _has("chat_id", "parent_chat_id"), partial(LengthRows, BAILIAN), _S),
    Lines("ragpulse", lambda row: isinstance(row.get("hash_ids"), dict), partial(LengthRows, RAGPULSE), _S),
    Lines("openai-batch", _has("custom_id", "body"), OpenAIBatch),
    Lines("servegen", _inside("data", "text_tokens", "image_tokens"), ServeGen, _S),
    Lines("aiperf-multi-turn", _has("turns"), MultiTurn, _MS, optional=True),
    Lines(
        "mooncake",
        _any("input_length", "messages", "payload", "text_input"),
        partial(Mooncake, MOONCAKE),
        _MS,
        optional=True,
    ),
    Lines("vllm-custom-image", _any("prompt", "content"), CustomImage),
    Lines("aiperf-single-turn", _any("text", "texts", "image", "images"), SingleTurn, _MS, optional=True),
)

#: Known documents that are not traces with a request a line: (a word at their start, a description).
FOREIGN = (
    ("payloads", "AIPerf's inputs.json, which has no times and is one document"),
    ("spans", "OpenTelemetry spans in one document"),
    ("resourceSpans", "OpenTelemetry spans in one document"),
)
READABLE = (
    ", ".join(dict.fromkeys(name for kind in (*JSON, *CSV) for name in [kind.name]))
    + ", and folders of ServeGen clients (see docs/traces.md)"
)

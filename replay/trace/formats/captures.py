"""Recorded requests of serving APIs: OpenAI's batch files, vLLM's custom_image dataset, SageMaker's Data Capture, and
Dynamo's request trace."""

from __future__ import annotations

from typing import Any

from tensorferry.pipeline.recording.request import (
    MAX_ID_CHARACTERS,
    MAX_OUTPUT_TOKENS,
    MAX_TOKENS,
    BrokenRow,
    Request,
)
from tensorferry.replay.trace.exact_numbers import NS, nanoseconds, whole
from tensorferry.replay.trace.formats.chat import Prompt, content
from tensorferry.replay.trace.formats.json_lines import (
    identity,
    json_object,
    list_of_integers,
    object_at,
    output_tokens,
)
from tensorferry.replay.trace.formats.media import decoded, image_at
from tensorferry.replay.trace.formats.times import JsonRows

_LIMITS = ("max_completion_tokens", "max_tokens")
_MS_NS = NS // 1000


class OpenAIBatch(JsonRows):
    """Rows of `{"custom_id", "method", "url", "body"}`, which have an order but no times.

    Source: platform.openai.com/docs/guides/batch. `vllm run-batch` reads them too.
    """

    name = "openai-batch"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        body = object_at(row, "body")
        prompt = Prompt.of_body(body)
        output, notes = output_tokens(body, *_LIMITS)
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=output,
            id=identity(row.get("custom_id"), "custom_id"),
            images=prompt.images,
            layout=prompt.layout,
            notes=notes + prompt.notes,
        )


class CustomImage(JsonRows):
    """vLLM's `custom_image` (0.33.0): `{"prompt", "image_files"}`, or `{"content"}` with images among the text."""

    name = "vllm-custom-image"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        if row.get("content") is not None:
            parts = content(row["content"], "content", bare_paths=True)
        else:
            files = row.get("image_files") or []
            if not isinstance(files, list):
                raise BrokenRow("bad_value", "image_files is not a list")
            words = row.get("prompt", "")
            if not isinstance(words, str):
                raise BrokenRow("bad_value", "prompt is not a string")
            parts = [*(image_at(file, f"image_files[{index}]") for index, file in enumerate(files)), words]
        prompt = Prompt.of(parts)
        output, notes = output_tokens(row, "output_tokens")
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=output,
            images=prompt.images,
            layout=prompt.layout,
            notes=notes,
        )


class SageMaker(JsonRows):
    """Hourly JSON lines of Data Capture with the request's and the answer's body, as JSON text or base64.

    Source: docs.aws.amazon.com/sagemaker, "Data capture".
    """

    name = "sagemaker"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        captured, metadata = object_at(row, "captureData"), row.get("eventMetadata")
        body = self._body(captured, "endpointInput")
        prompt = Prompt.of_body(body)
        output, notes = output_tokens({**body, **self._usage(captured)}, "completion_tokens", *_LIMITS)
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=output,
            id=str((metadata.get("eventId") if isinstance(metadata, dict) else "") or "")[:MAX_ID_CHARACTERS],
            images=prompt.images,
            layout=prompt.layout,
            notes=notes + prompt.notes,
        )

    def _body(self, captured: dict[str, Any], side: str) -> dict[str, Any]:
        part = object_at(captured, side)
        data = part.get("data")
        if part.get("encoding") == "BASE64":
            return json_object(decoded(data, f"{side}.data"))
        if not isinstance(data, str):
            raise BrokenRow("bad_value", f"captureData.{side}.data is not text")
        return json_object(data)

    def _usage(self, captured: dict[str, Any]) -> dict[str, Any]:
        """Return the usage that the answer states; empty if it is a stream, or was not captured."""
        try:
            usage = self._body(captured, "endpointOutput").get("usage")
        except BrokenRow:
            return {}
        return usage if isinstance(usage, dict) else {}


class Dynamo(JsonRows):
    """Rows of `dynamo.request.trace.v1`, one at the end of each request, so not in the order of arrival. Records of
    tools are among them. Block identities are unsigned and have 64 bits."""

    name = "dynamo"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        event = object_at(row, "event")
        if event.get("event_type") != "request_end":
            kind = str(event.get("event_type"))[:40]
            raise BrokenRow("not_a_request", f"it is a record of the kind {kind}, not a request")
        request = object_at(event, "request")
        replay = request.get("replay") or {}
        agent = event.get("agent_context") or {}
        if not isinstance(replay, dict) or not isinstance(agent, dict):
            raise BrokenRow("bad_value", "request.replay or agent_context is not an object")
        blocks = list_of_integers(replay.get("input_sequence_hashes") or [], "request.replay.input_sequence_hashes")
        took = request.get("total_time_ms")
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=whole(request.get("output_tokens"), "request.output_tokens", MAX_OUTPUT_TOKENS),
            id=identity(request.get("request_id"), "request.request_id"),
            text_tokens=whole(request.get("input_tokens"), "request.input_tokens", MAX_TOKENS, least=1),
            blocks=blocks,
            block_tokens=whole(replay.get("trace_block_size"), "trace_block_size", MAX_TOKENS, least=1)
            if blocks
            else 0,
            session=identity(agent.get("session_id"), "agent_context.session_id"),
            took_ns=None if took is None else nanoseconds(took, "request.total_time_ms", _MS_NS),
        )

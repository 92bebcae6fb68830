"""Spans: of a real deployment, taken by a real receiver, whole and in order; and nobody who waits for that receiver."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tensorferry.cli.main import main
from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, TelemetrySpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.pipeline.telemetry import span_exporter as spans
from tensorferry.pipeline.telemetry import traceparent
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.pipeline.telemetry.span import Span
from tensorferry.pipeline.telemetry.span_exporter import CLOSE_S, MOST_WAITING, Exporter, require_installed
from tensorferry.stages.request_spans import Ended, new_context
from tensorferry.stages.scheduler.splice import splice

service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="pip install 'tensorferry[otel]'"
)
proto = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
otlp = pytest.importorskip("tensorferry.pipeline.telemetry.otlp")

pytestmark = pytest.mark.timeout(120)

W3C = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOCAL = Path(__file__).parents[3] / "configs" / "local.yaml"
ENOUGH_S = 30.0


# --- contexts -----------------------------------------------------------------------------------------------------


def test_a_header_survives_the_wire() -> None:
    context = traceparent.parse(W3C)
    assert context is not None
    assert len(context) == 25
    assert traceparent.header(context) == W3C
    assert traceparent.sampled(context)
    unsampled = traceparent.parse(W3C[:-1] + "0")
    assert unsampled is not None
    assert not traceparent.sampled(unsampled)


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ("", False),
        (W3C.upper(), False),
        (W3C[:-1], False),
        (W3C + "-more", False),  # version 00 has nothing behind the flags
        ("01" + W3C[2:] + "-more", True),  # later versions may
        ("ff" + W3C[2:], False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
    ],
)
def test_what_is_no_header_begins_a_trace_anew(header: str, known: bool) -> None:
    assert (traceparent.parse(header) is not None) == known


def test_a_request_without_a_trace_has_one_by_its_own_id() -> None:
    submit = wire.Submit(b"r" * 16, 0, (), 1, 1000)
    assert traceparent.trace_id(new_context(submit)) == b"r" * 16
    assert any(traceparent.trace_id(new_context(msgspec.structs.replace(submit, request=bytes(16)))))
    theirs = traceparent.parse(W3C)
    ours = new_context(msgspec.structs.replace(submit, context=theirs))
    assert theirs is not None
    assert ours[:16] == theirs[:16]
    assert ours[16:24] != theirs[16:24]


def test_an_engine_is_told_the_context() -> None:
    admit = wire.Admit(bytes(16), 0, 1, wire.Origin("tokenizer", 0, 1), (), b"", (), 1, 1)
    assert splice(admit, {}, 7).traceparent is None
    assert splice(msgspec.structs.replace(admit, context=traceparent.parse(W3C)), {}, 7).traceparent == W3C


# --- the receiver -------------------------------------------------------------------------------------------------


class Receiver:
    """An OTLP receiver on loopback. `spans` is what it has taken; while `goes_on` is not set it does not answer."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.status, self.refused, self.calls, self.hangs_up = 200, 0, 0, False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.calls += 1
                receiver.goes_on.wait(ENOUGH_S)
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                answer = service.ExportTraceServiceResponse()
                answer.partial_success.rejected_spans = receiver.refused
                if receiver.status == 200:
                    receiver.messages.append(service.ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                told = answer.SerializeToString()
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)
                self.close_connection = receiver.hangs_up

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def spans(self) -> list[Any]:
        return [s for m in self.messages for r in m.resource_spans for scope in r.scope_spans for s in scope.spans]

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@contextmanager
def exporting(endpoint: str) -> Iterator[tuple[Exporter, Counters]]:
    deployment = Deployment(name="x", telemetry=TelemetrySpec(otlp_endpoint=endpoint))
    counters = Counters()
    exporter = Exporter(deployment, "tokenizer", 3, counters)
    try:
        yield exporter, counters
    finally:
        exporter.close()


def one(name: str = "x") -> Span:
    return Span(name, bytes(range(1, 26)), time.monotonic_ns(), time.monotonic_ns() + 1000)


def attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def test_a_span_arrives_with_all_that_it_says(receiver: Receiver) -> None:
    with exporting(f"{receiver.endpoint}/v1/traces/") as (exporter, counters):
        before_ns = time.time_ns()
        said = Span(
            "engine",
            b"t" * 16 + b"s" * 8 + b"\x01",
            time.monotonic_ns(),
            time.monotonic_ns() + 5_000_000,
            parent=b"t" * 16 + b"p" * 8 + b"\x01",
            remote=True,
            serves=True,
            attributes={"text": "ü", "count": 3, "share": 0.5, "ranks": (0, 2)},
            links=(b"l" * 16 + b"k" * 8 + b"\x01",),
            problem="it broke",
        )
        exporter.take(lambda: [said])
    (span,) = receiver.spans
    assert (span.name, span.trace_id, span.span_id, span.parent_span_id) == ("engine", b"t" * 16, b"s" * 8, b"p" * 8)
    assert span.kind == proto.Span.SPAN_KIND_SERVER
    assert span.flags == proto.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | proto.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK | 1
    assert before_ns - 1_000_000 <= span.start_time_unix_nano <= time.time_ns()
    assert 5_000_000 <= span.end_time_unix_nano - span.start_time_unix_nano < 6_000_000
    said_attributes = attributes(span.attributes)
    assert [value.int_value for value in said_attributes.pop("ranks").values] == [0, 2]
    assert said_attributes == {"text": "ü", "count": 3, "share": 0.5}
    assert [(link.trace_id, link.span_id) for link in span.links] == [(b"l" * 16, b"k" * 8)]
    assert (span.status.code, span.status.message) == (proto.Status.STATUS_CODE_ERROR, "it broke")
    resource = attributes(receiver.messages[0].resource_spans[0].resource.attributes)
    assert (resource["service.name"], resource["service.namespace"]) == ("tensorferry", "x")
    assert resource["service.instance.id"] == "tokenizer-3"
    assert counters.value("spans_lost") == 0


def test_what_nobody_takes_is_counted_and_the_next_is_sent(receiver: Receiver, until: Callable[..., None]) -> None:
    """Away, refused as a whole, refused in part, and a bug in making it; then all is well again."""
    with exporting(receiver.endpoint) as (exporter, counters):
        receiver.status = 503
        exporter.take(lambda: [one()])
        until(lambda: counters.value("spans_lost") == 1)
        receiver.status, receiver.refused = 200, 2
        exporter.take(lambda: [one()])
        until(lambda: counters.value("spans_lost") == 3)
        exporter.take(lambda: [one("\ud800")])  # cannot be encoded
        until(lambda: counters.value("spans_lost") == 4)
        receiver.refused = 0
        exporter.take(lambda: [one("last")])
        until(lambda: receiver.spans and receiver.spans[-1].name == "last")
        assert counters.value("spans_lost") == 4
    with exporting("http://127.0.0.1:1") as (exporter, counters):
        exporter.take(lambda: [one()])
    assert counters.value("spans_lost") == 1


def test_a_connection_that_was_closed_meanwhile_costs_nothing(receiver: Receiver) -> None:
    receiver.hangs_up = True
    sender = otlp.Receiver(receiver.endpoint, {})
    for number in range(3):
        assert sender.send([one(str(number))]) == 0
    sender.close()
    assert [span.name for span in receiver.spans] == ["0", "1", "2"]


def test_nobody_waits_for_a_receiver_that_takes_and_does_not_answer(
    receiver: Receiver, until: Callable[..., None]
) -> None:
    receiver.goes_on.clear()
    with exporting(receiver.endpoint) as (exporter, counters):
        exporter.take(lambda: [one()])
        until(lambda: receiver.calls)
        began = time.monotonic()
        for _ in range(MOST_WAITING + 10):
            exporter.take(lambda: [one()])
        assert time.monotonic() - began < 1
        assert counters.value("spans_lost") == 10
        began = time.monotonic()
        exporter.close()
        assert time.monotonic() - began < CLOSE_S + 1
        assert counters.value("spans_lost") == 10 + MOST_WAITING
        receiver.goes_on.set()


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n"])
def test_a_receiver_that_answers_byte_by_byte_has_no_more_time(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "SEND_S", 0.5)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line, suppress(OSError):  # the sender has had enough
            line.sendall(part)
            while not over.wait(0.05):
                line.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener,), daemon=True)
        dripping.start()
        sender = otlp.Receiver(f"http://127.0.0.1:{listener.getsockname()[1]}", {})
        stop = threading.Timer(ENOUGH_S, over.set)
        stop.start()
        with pytest.raises(TimeoutError, match="no whole answer within"):
            sender.send([one()])
        assert not over.is_set()
        stop.cancel()
        over.set()
        dripping.join(ENOUGH_S)
        sender.close()


# --- what is told of a request ------------------------------------------------------------------------------------


def ended(outcome: wire.Result | wire.Failed, **marks: int) -> list[Span]:
    submit = wire.Submit(b"r" * 16, 0, (), 7, 1000)
    return list(Ended.of(submit, new_context(submit), "some-vit", outcome, marks, 99).spans())


def test_parts_follow_each_other_without_a_gap() -> None:
    """Two encoder ranks: what counts is when the last of them was there."""
    steps = [("received", 10), ("planned", 20), ("sent", 30), ("encoding", 35), ("encoding", 40), ("read-1", 41)]
    steps += [("encoded", 50), ("done", 80), ("answered", 90)]
    marks = tuple(wire.Mark(step, at_ns) for step, at_ns in steps)
    item = wire.ItemReport(1, (1, 2, 2), 1, "inline", 100, b"")
    whole, *parts = ended(wire.Result(b"r" * 16, 0, 5, 6, (item,), marks))
    assert (whole.start_ns, whole.end_ns, whole.parent) == (10, 99, b"")
    assert [(part.name, part.start_ns, part.end_ns) for part in parts] == [
        ("planning", 10, 20),
        ("hand-over", 20, 30),
        ("encoder queue", 30, 40),
        ("encoding", 40, 50),
        ("engine", 50, 80),
        ("answer", 80, 90),
    ]
    assert {part.parent for part in parts} == {whole.context}
    assert whole.attributes["gen_ai.usage.output_tokens"] == 6
    assert whole.attributes["tensorferry.items_inline"] == 1


def test_of_a_failed_request_is_told_as_much_as_is_known() -> None:
    failure = wire.Failure("BadItem", "item 3: no image", wire.Origin("encoder", 2, 5), 3)
    whole, *parts = ended(wire.Failed(b"r" * 16, 0, failure), received=10, planned=20)
    assert (whole.end_ns, whole.problem) == (99, "item 3: no image")
    assert (whole.attributes["error.type"], whole.attributes["tensorferry.origin"]) == ("BadItem", "encoder-2")
    assert [part.name for part in parts] == ["planning"]


# --- the configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4318",
        "grpc://x:1",
        "http://",
        "http://x:port",
        "http://x:0",
        "http://a:b@x",
        "http://x?y",
        "http://[x",
    ],
)
def test_what_is_no_receiver_is_refused_by_its_key(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint"):
        load(LOCAL, [f"telemetry.otlp_endpoint={endpoint}"])


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"pip install 'tensorferry\[otel\]'"):
        require_installed()
    asked = ["config", "check", str(LOCAL), "--set", "telemetry.otlp_endpoint=http://127.0.0.1:4318"]
    said = CliRunner().invoke(main, asked)
    assert (said.exit_code, "tensorferry[otel]" in said.stderr) == (2, True)


@pytest.mark.processes
def test_without_the_key_nothing_of_it_is_imported() -> None:
    """In particular not where it is not installed."""
    modules = "tensorferry.stages.tokenizer.tokenizer, tensorferry.stages.encoder.encoder"
    code = f"import sys, {modules}; print('opentelemetry' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "False\n"


# --- a whole deployment -------------------------------------------------------------------------------------------


DEPLOYMENT = """
name: spans-test
transport: shm
runtime_dir: {runtime}/run
model: {{adapter: fingerprint}}
encoder: {{ranks: 2, batch_wait_ms: 100}}
pool: {{budget_mb: 32}}
embeddings_pool: {{budget_mb: 16}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: error, otlp_endpoint: '{endpoint}'}}
"""


def photo(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


@pytest.mark.processes
async def test_a_deployment_tells_of_every_request_and_call(
    receiver: Receiver, tmp_path: Path, until: Callable[..., None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(runtime=runtime, endpoint=receiver.endpoint))
        deployment = load(file)
        async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=ENOUGH_S) as client:
            asked = [
                client.submit(["look ", photo(1), photo(2)], output_tokens=3, request=b"a" * 16),
                client.submit(["look ", photo(3)], output_tokens=3, request=b"b" * 16, traceparent=W3C),
                client.submit(["look ", photo(4)], output_tokens=3, request=b"c" * 16, traceparent=W3C[:-1] + "0"),
                client.submit(["look ", b"no image"], output_tokens=3, request=b"d" * 16),
            ]
            began_ns = time.time_ns()
            outcomes = await asyncio.gather(*asked)
            over_ns = time.time_ns()
            assert [type(outcome) for outcome in outcomes] == [wire.Result, wire.Result, wire.Result, wire.Failed]
            await asyncio.to_thread(until, lambda: len(whole(receiver)) >= 3 and len(linked_by(calls(receiver))) >= 2)
            before, told = whole(receiver), calls(receiver)
            receiver.goes_on.clear()  # from here on, it takes and does not answer
            again = await client.submit(["look ", photo(5)], output_tokens=3)
            assert isinstance(again, wire.Result)
        receiver.goes_on.set()
    by_request = {attributes(span.attributes)["tensorferry.request"]: span for span in before}
    assert set(by_request) == {(letter * 16).hex() for letter in (b"a", b"b", b"d")}  # c's client keeps none
    first, theirs, failed = (by_request[(letter * 16).hex()] for letter in (b"a", b"b", b"d"))
    assert (first.trace_id, first.parent_span_id) == (b"a" * 16, b"")
    assert (theirs.trace_id.hex(), theirs.parent_span_id.hex()) == tuple(W3C.split("-")[1:3])
    assert failed.status.code == proto.Status.STATUS_CODE_ERROR
    assert attributes(failed.attributes)["error.type"] == "BadItem"
    usual = ["planning", "processing", "hand-over", "encoder queue", "encoding", "to the scheduler"]
    for root in (first, theirs):
        assert root.name == "generate_content fingerprint"
        assert attributes(root.attributes)["gen_ai.usage.output_tokens"] == 3
        assert began_ns - 10**7 < root.start_time_unix_nano < root.end_time_unix_nano < over_ns + 10**7
        parts = [span for span in receiver.spans if span.parent_span_id == root.span_id]
        assert {part.trace_id for part in parts} == {root.trace_id}
        assert [part.name for part in parts] == [*usual, "scheduler queue", "engine", "answer"]
        edges = [root.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
        assert [part.start_time_unix_nano for part in parts] == edges[:-1]
        assert edges[-1] <= root.end_time_unix_nano
    assert linked_by(told) == {(root.trace_id, root.span_id) for root in (first, theirs)}
    assert sum(attributes(call.attributes)["tensorferry.items"] for call in told) >= 3
    for call in told:
        for link in call.links:
            (root,) = [span for span in (first, theirs) if span.span_id == link.span_id]
            assert root.start_time_unix_nano <= call.start_time_unix_nano
            assert call.end_time_unix_nano <= root.end_time_unix_nano


def whole(receiver: Receiver) -> list[Any]:
    return sorted(
        (span for span in receiver.spans if span.name.startswith("generate_content")),
        key=lambda span: attributes(span.attributes)["tensorferry.request"],
    )


def calls(receiver: Receiver) -> list[Any]:
    return [span for span in receiver.spans if span.name.startswith("embeddings")]


def linked_by(spans: Sequence[Any]) -> set[tuple[bytes, bytes]]:
    """Trace and span of every request that these calls were for."""
    return {(link.trace_id, link.span_id) for span in spans for link in span.links}

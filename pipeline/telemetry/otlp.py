"""Spans on the wire: OTLP over HTTP, in its binary encoding. Imports what `pip install 'tensorferry[otel]'` brings.

The messages are the official ones; OpenTelemetry's SDK is not used. Its span objects and exporter took 0.28 ms of CPU
for the ten spans of a request, a tenth of all that a small request costs; this takes 0.06.

Source: OpenTelemetry Protocol, "OTLP/HTTP": Protobuf by POST to /v1/traces, partial success; trace.proto for the flags.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OnWire
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tensorferry import __version__
from tensorferry.pipeline.telemetry.span import Attribute, Attributes, Span
from tensorferry.pipeline.telemetry.traceparent import span_id, trace_id

SEND_S = 5.0  #: for all of one `send`: connecting, sending and the whole answer
MOST_ANSWERED = 64 << 10  #: bytes of an answer that are looked at
_PATH = "/v1/traces"
_MOST_KEPT = 256
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # of a span's flags: whether its parent is of another process


class Receiver:
    """One connection, kept open, to whoever takes spans; made when there is something to send."""

    def __init__(self, endpoint: str, resource: Attributes) -> None:
        """endpoint: a URL, with or without /v1/traces. resource: which process sends."""
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        self._tls = ssl.create_default_context() if tls else None
        self._path = parts.path.rstrip("/").removesuffix(_PATH) + _PATH
        self._connection = (HTTPSConnection if tls else HTTPConnection)(parts.hostname, parts.port)
        self._resource = resource

    def send(self, spans: Iterable[Span]) -> int:
        """How many spans were refused alone. Raises OSError or HTTPException where none was taken, TimeoutError among
        them where that took longer than SEND_S, however often the receiver says a byte."""
        body = encoded(spans, self._resource).SerializeToString()
        ends_at = time.monotonic() + SEND_S
        kept = self._connection.sock is not None
        try:
            return self._post(body, ends_at)
        except (ConnectionError, HTTPException):
            if not kept:  # else the other side may have closed it since
                raise
        return self._post(body, ends_at)

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes, ends_at: float) -> int:
        try:
            with self._ended_at(ends_at):
                self._connection.request("POST", self._path, body, {"Content-Type": "application/x-protobuf"})
                response = self._connection.getresponse()
                answer = response.read(MOST_ANSWERED)
            if not 200 <= response.status < 300:
                raise HTTPException(f"it answers {response.status} {response.reason}")
            return int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans)
        except BaseException:  # whatever it was, half an answer may be left on the connection: the next needs a new one
            self._connection.close()
            raise

    @contextmanager
    def _ended_at(self, ends_at: float) -> Iterator[None]:
        """The connection, made where there is none, for a block that ends with TimeoutError when the time is up.

        A socket's own timeout begins again with every byte, so a timer shuts down both directions instead.
        """
        late = TimeoutError(f"no whole answer within {SEND_S:g} s")
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise late
        try:
            plain = self._connection.sock
            if plain is None:
                plain = socket.create_connection((self._connection.host, self._connection.port), left_s)
                self._connection.sock = plain  # closed with the connection, if a later step fails
                made = True
            else:
                plain.settimeout(left_s)
                made = False
            # One of our own: TLS takes the descriptor out of the socket that it is given.
            with socket.socket(fileno=os.dup(plain.fileno())) as line, _shut_down_at(line, ends_at) as ended:
                if made and self._tls is not None:
                    self._connection.sock = self._tls.wrap_socket(plain, server_hostname=self._connection.host)
                yield
        except (OSError, HTTPException) as problem:
            if isinstance(problem, TimeoutError) or time.monotonic() >= ends_at:
                raise late from None
            raise
        if ended.is_set():
            raise late


@contextmanager
def _shut_down_at(line: socket.socket, ends_at: float) -> Iterator[threading.Event]:
    """Shut a connection down when the time is up within the block; the event says that it was."""
    ended = threading.Event()

    def end() -> None:
        ended.set()
        with suppress(OSError):  # the other side has closed it
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(ends_at - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        yield ended
    finally:
        timer.cancel()
        timer.join()  # before the descriptor is closed: its number may be another's then


def encoded(spans: Iterable[Span], resource: Attributes) -> ExportTraceServiceRequest:
    """Spans of one process in one message."""
    epoch_ns = time.time_ns() - time.monotonic_ns()  # one for all: what touches here touches there
    message = ExportTraceServiceRequest()
    of_process = message.resource_spans.add()
    of_process.resource.attributes.extend(_pairs(resource))
    of_scope = of_process.scope_spans.add()
    of_scope.scope.name, of_scope.scope.version = "tensorferry", __version__
    add = of_scope.spans.add
    for span in spans:
        one = add(
            trace_id=trace_id(span.context),
            span_id=span_id(span.context),
            parent_span_id=span_id(span.parent),
            flags=span.context[24] | _HAS_IS_REMOTE | (_IS_REMOTE if span.remote else 0),
            name=span.name,
            kind=OnWire.SPAN_KIND_SERVER if span.serves else OnWire.SPAN_KIND_INTERNAL,
            start_time_unix_nano=epoch_ns + span.start_ns,
            end_time_unix_nano=epoch_ns + span.end_ns,
            attributes=_pairs(span.attributes),
        )
        for context in span.links:
            one.links.add(trace_id=trace_id(context), span_id=span_id(context), flags=context[24])
        if span.problem is not None:
            one.status.code, one.status.message = Status.STATUS_CODE_ERROR, span.problem
    return message


def _pairs(attributes: Attributes) -> list[KeyValue]:
    return [_pair(key, value) for key, value in attributes.items()]


@lru_cache(_MOST_KEPT, typed=True)  # most attributes of most spans are the same few; what is kept is copied by protobuf
def _pair(key: str, value: Attribute) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


def _value(value: Attribute) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))

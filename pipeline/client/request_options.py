"""What a request may say of itself besides its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from tensorferry.codecs import messages as wire


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `Client.submit`, `submit_nowait` and `stream`."""

    output_tokens: int  #: of the answer, at most; 0 by default
    deadline_s: float | None  #: the request fails after it; the deployment's limit by default
    request: bytes | None  #: an id of 16 bytes, random by default; an id that is in flight is refused
    traceparent: str | None  #: the W3C header of the trace that it belongs to; a malformed one is ignored
    sampling: wire.Sampling | None  #: how the engine chooses tokens; the likeliest one by default
    priority: int  #: -100 to 100; lower ones are served first
    tenant: str  #: whose request it is: tenants share an engine fairly, and by default each client is one


@dataclass(frozen=True, slots=True)
class Chosen:
    """RequestOptions, all of them."""

    output_tokens: int = 0
    deadline_s: float | None = None
    request: bytes | None = None
    traceparent: str | None = None
    sampling: wire.Sampling | None = None
    priority: int = 0
    tenant: str = ""

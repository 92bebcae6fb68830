"""tensorferry: an asyncio ZeroMQ pipeline that ferries tensors between the stages of a vision-language server.

The names below are imported on first use, so that a process which only wants one of them does not
pay for the others (the host pool, in particular, imports without torch).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorferry.codecs.messages import Payload as Payload
    from tensorferry.codecs.messages import Proxy as Proxy
    from tensorferry.codecs.pool.pool import Pool as Pool
    from tensorferry.codecs.publisher import Publisher as Publisher
    from tensorferry.codecs.reader import Reader as Reader
    from tensorferry.pipeline.client import Client as Client

__version__ = "0.1.0"

_HOMES = {
    "Client": "tensorferry.pipeline.client",
    "Payload": "tensorferry.codecs.messages",
    "Pool": "tensorferry.codecs.pool.pool",
    "Proxy": "tensorferry.codecs.messages",
    "Publisher": "tensorferry.codecs.publisher",
    "Reader": "tensorferry.codecs.reader",
}

__all__ = ["Client", "Payload", "Pool", "Proxy", "Publisher", "Reader", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorferry' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Whether a proxy that was received declares what it was lent for (promise L8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.messages import Payload, Proxy


def check_declared(payloads: Sequence[Payload], consumers: int) -> None:
    """Compare what proxies declare with what their receiver knows.

    payloads: all those of one message between stages, which release a lease once for each proxy that names it.
    consumers: how many processes such a lease is lent to. Raises BadMessage. A wrong number would free bytes that are
    still to be read, or keep them for releases that never come.
    """
    proxies = [payload for payload in payloads if isinstance(payload, Proxy)]
    uses = Counter(map(lease_of, proxies))
    for proxy in proxies:
        expected = consumers, uses[lease_of(proxy)]
        if (proxy.consumers, proxy.uses) != expected:
            raise BadMessage(
                f"slot {proxy.slot} generation {proxy.generation} of pool {proxy.pool} declares {proxy.consumers} "
                f"consumers and {proxy.uses} uses; it was lent to {expected[0]}, and this message names it "
                f"{expected[1]} times: its sender must declare these numbers"
            )


def lease_of(proxy: Proxy) -> tuple[int, int, int]:
    """Pool, slot and generation."""
    return proxy.pool, proxy.slot, proxy.generation

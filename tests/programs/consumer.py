"""A consumer of a broker's pool: `consumer.py SOCKET POOL`. Attaches and prints its column.

Then each line of stdin is the msgpack of a Proxy, in hexadecimal: its bytes are read and acknowledged, and printed. The
line `hold` prints `holding` and never ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.messages import Origin, Proxy
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.pools.broker import attach


def main(path: str, pool: str) -> None:
    reader = Reader()
    origin = Origin("encoder", 0, reader.consumer)
    try:
        print(asyncio.run(attach(path, origin, int(pool), reader, 10.0)), flush=True)
    except FerryError as problem:
        print(f"{type(problem).__name__}: {problem}", flush=True)
        return
    for line in sys.stdin:
        if line == "hold\n":
            print("holding", flush=True)
            signal.pause()
        with reader.open(msgspec.msgpack.decode(bytes.fromhex(line), type=Proxy)) as view:
            print(view.data.tobytes().hex(), flush=True)


main(*sys.argv[1:])

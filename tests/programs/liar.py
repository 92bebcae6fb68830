"""A processor and an adapter in whose process proxies declare what is not so.

`options.lie` is a path. While a file is there, `consumers` or `uses` in it names the number that is one too high.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.pipeline.deployment.spec import LimitsSpec, ModelSpec
from tensorferry.stages.adapters.fingerprint import Fingerprint
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor


def lie(options: Mapping[str, object]) -> None:
    truthful, file = Draft.dispatch, Path(str(options["lie"]))

    def dispatch(draft: Draft, *args: Any, **kwargs: Any) -> list[Payload]:
        payloads = truthful(draft, *args, **kwargs)
        if not file.exists():
            return payloads
        field = file.read_text()
        return [
            msgspec.structs.replace(payload, **{field: getattr(payload, field) + 1})
            if isinstance(payload, Proxy)
            else payload
            for payload in payloads
        ]

    Draft.dispatch = dispatch  # type: ignore[method-assign]


class Processor(Qwen2VLProcessor):
    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        super().__init__({}, limits)
        lie(options)


class Adapter(Fingerprint):
    def __init__(self, spec: ModelSpec, threads: int) -> None:
        super().__init__(msgspec.structs.replace(spec, options={}), threads)
        lie(spec.options)

"""A request as its client sends it first."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.pipeline.client.argument_checks import (
    REQUEST_NBYTES,
    check_arguments,
    check_choices,
    check_decodes,
    check_list,
    check_sizes,
)
from tensorferry.pipeline.client.prompt_parts import Part, prompt_on_wire
from tensorferry.pipeline.client.request_options import Chosen
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.pipeline.telemetry.traceparent import parse


class Submission(NamedTuple):
    submit: wire.Submit
    frames: list[Buffer]
    deadline_s: float

    @classmethod
    def of(cls, parts: Sequence[Part], chosen: Chosen, limits: LimitsSpec, most: Limits, *, stream: bool) -> Submission:
        """limits: the deployment's. most: what a message may have. Raises BadRequest, which names the argument."""
        check_list(parts)
        check_arguments(chosen.output_tokens, chosen.deadline_s, chosen.request, chosen.traceparent)
        check_choices(chosen.sampling, chosen.priority, chosen.tenant)
        frames: list[Buffer] = []
        wire_parts = prompt_on_wire(parts, frames, file_nbytes=limits.item_mb << 20)
        check_sizes(wire_parts, frames, most)
        longest_s = limits.request_timeout_s
        deadline_s = longest_s if chosen.deadline_s is None else min(chosen.deadline_s, longest_s)
        submit = wire.Submit(
            secrets.token_bytes(REQUEST_NBYTES) if chosen.request is None else chosen.request,
            0,
            wire_parts,
            chosen.output_tokens,
            max(1, int(deadline_s * 1000)),
            None if chosen.traceparent is None else parse(chosen.traceparent),
            chosen.sampling,
            stream,
            chosen.priority,
            chosen.tenant,
        )
        check_decodes(submit, frames, most)
        return cls(submit, frames, deadline_s)

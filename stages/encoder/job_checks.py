"""What an encoder rank checks of a job before it queues it: the message comes from another process, which may err."""

from __future__ import annotations

from math import prod

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.pool.declared import check_declared
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.stages.assignment import owners


def check_addressees(message: wire.Encode, attention_tp_size: int) -> None:
    """Raise BadMessage unless the message names one whole attention group, and its proxies declare that they were lent
    to one rank."""
    ranks = [rank.rank for rank in message.schedulers]
    first = ranks[0] // attention_tp_size * attention_tp_size if ranks else 0
    if ranks != list(range(first, first + attention_tp_size)):
        raise BadMessage(
            f"scheduler ranks {ranks} are not one attention group; a group is {attention_tp_size} ranks in order "
            "(scheduler.attention_tp_size)"
        )
    check_declared(payloads_of(message), 1)


def payloads_of(message: wire.Encode) -> list[wire.Payload]:
    """All features that a message carries."""
    return [feature.payload for item in message.items for feature in item.features]


def check_assignment(message: wire.Encode, deployment: Deployment, epoch: int) -> None:
    """Raise BadMessage unless the message has exactly the items that are assigned to the rank with this epoch.

    Every process computes the assignment alike.
    """
    assignment, most_rows = deployment.encoder.assignment, deployment.limits.request_tokens
    # An item without patches is assigned to no rank: its embeddings came with the request.
    encoded = [index for index, item in enumerate(message.items) if prod(item.grid)]
    assigned = message.anew or encoded
    if (rows := sum(item.rows for item in message.items)) > most_rows:  # an adapter makes as many as it is told
        raise BadMessage(f"the items have {rows} rows; limits.request_tokens is {most_rows}")
    if list(assigned) != sorted({*assigned} & {*encoded}):
        raise BadMessage(f"items {message.anew} to encode again, of {encoded}; each is named once, in order")
    places = message.owners or owners(
        assignment,
        message.request,
        [prod(message.items[index].grid) for index in assigned],
        [message.items[index].content_hash for index in assigned],
        [rank.rank for rank in message.encoders],
    )
    if len(places) != len(assigned) or max(places, default=0) >= max(1, len(message.encoders)):
        raise BadMessage(f"owners {places} of {len(assigned)} items, among {len(message.encoders)} encoder ranks")
    epochs = [message.encoders[place].epoch for place in places]
    mine = [index for index, owner in zip(assigned, epochs, strict=True) if owner == epoch]
    sent = [index for index, item in enumerate(message.items) if item.features]
    if mine != sent:
        by = "the message itself" if message.owners else f"encoder.assignment: {assignment}"
        raise BadMessage(f"{by} gives this rank items {mine}, but the message carries {sent}")
    for index in sent:
        if len(names := [feature.name for feature in message.items[index].features]) != 1:
            raise BadMessage(f"item {index} has the features {names}; this deployment's model reads one tensor an item")

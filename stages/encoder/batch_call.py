"""One call of a model adapter, for the items of several requests: what it may load, and where it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, FerryError, item_of, text_of
from tensorferry.codecs.pool.publisher import Draft, Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View
from tensorferry.stages.adapters.base import Finish, ItemInfo, ModelAdapter
from tensorferry.stages.encoder.embedding_cache import Content, EmbeddingCache, Outputs
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_queue import Job, JobItem
from tensorferry.stages.gpu_wait import wait_ready


@dataclass(slots=True)
class Made:
    """The embeddings of one item, in leases of this rank's own pool, not yet sent."""

    info: ItemInfo
    outputs: dict[str, Draft] = field(default_factory=dict)

    @property
    def views(self) -> Outputs:
        return {name: draft.views[0] for name, draft in self.outputs.items()}


@dataclass(slots=True)
class _Owner:
    """An item of a request, with its place for embeddings."""

    job: Job
    item: JobItem
    made: Made


class Call:
    """See the module. Items have numbers of the call's own, 0 .. n-1, as two requests may both have an item 0.

    With a cache, items of equal content are one item to the adapter, and those that the cache knows are none. All
    leases are of `block`, which a call that fails is thrown away with; what was read of the features is not lost.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        cache: EmbeddingCache | None,
        publisher: Publisher,
        device: int | None,
        block: ExitStack,
    ) -> None:
        self._cache, self._publisher, self._device, self._block = cache, publisher, device, block
        self._made: dict[Job, list[Made]] = {job: [] for job in jobs}
        self._owners: list[list[_Owner]] = []  # by number: who wants this content; the first one's features are read
        self._known: list[tuple[Made, Outputs]] = []
        self._loaded: set[int] = set()
        self._copies: list[tuple[Content, Outputs]] = []  # for the cache
        self._lost: int | None = None  # whose features could not be had
        self._borrows = False
        self._copied_ns = 0
        places: dict[Content, int] = {}
        for job in jobs:
            for item in job.items:
                made = Made(item.info)
                self._made[job].append(made)
                if cache is not None and (known := job.known(item, cache)) is not None:
                    self._known.append((made, known))
                    continue
                # Without a cache nobody relies on content hashes, so every item is encoded.
                place = len(self._owners) if cache is None else places.setdefault(item.content, len(self._owners))
                if place == len(self._owners):
                    self._owners.append([])
                self._owners[place].append(_Owner(job, item, made))
        self.items = [replace(owners[0].item.info, index=place) for place, owners in enumerate(self._owners)]

    @property
    def found(self) -> int:
        """Items whose embeddings are those of an equal one."""
        return len(self._known) + sum(len(owners) - 1 for owners in self._owners)

    @property
    def copied_ns(self) -> int | None:
        """When the last features were copied, so that none is held any more; None where one was borrowed, or none."""
        return None if self._borrows else self._copied_ns or None

    async def wait_ready(self, reader: Reader, patience_s: float, *, unless: Callable[[], bool]) -> None:
        """Until all features that it reads are written, or `unless` says no. Raises as `staging.wait_ready`."""
        for place, owners in enumerate(self._owners):
            payload = owners[0].job.features.unread(owners[0].item.info.index)
            if isinstance(payload, wire.Proxy):
                try:
                    await wait_ready(reader, [payload], patience_s, unless=unless)
                except FerryError:
                    self._lost = place
                    raise

    def run(self, adapter: ModelAdapter) -> Finish | None:
        """Encode what nobody has encoded, and give everybody the embeddings; in the rank's thread.

        Returns what the adapter has left to do. Raises what the adapter raises, and BadItem for outputs that it should
        have made.
        """
        finish = adapter.encode(self.items, self.load, self.out) if self.items else None
        for item, (first, *others) in zip(self.items, self._owners, strict=True):
            _check(item, first.made)
            for other in others:
                self._copy(first.made.views, other.made)
            if self._cache is not None:
                copies = {name: view.copy() for name, view in first.made.views.items()}
                self._copies.append((first.item.content, copies))
        for made, known in self._known:
            self._copy(known, made)
        return finish

    def keep(self) -> None:
        """Have the cache keep what was made, when it is known to be right."""
        if self._cache is not None:
            for content, copies in self._copies:
                self._cache.put(content, copies)

    def made(self, job: Job) -> Sequence[Made]:
        """What is to be sent for a request, in its own order; after `run`."""
        return self._made[job]

    def understood(self, problem: Exception) -> Exception:
        """What was raised; of an item that the adapter was not given, in other words."""
        if isinstance(problem, BadItem) and item_of(problem, len(self._owners)) < 0:
            said = (
                f"the adapter raised BadItem for item {problem.index!r:.80} of {len(self._owners)}: {text_of(problem)}"
            )
            return ValueError(said)
        return problem

    def at_fault(self, problem: Exception) -> dict[Job, Exception]:
        """Whom a failure of `run`, of what it returned, or of `wait_ready` is due to, each with the error in its own
        terms; empty: who knows."""
        if self._lost is not None:
            owners = self._owners[self._lost][:1]  # another's features of equal content may be sound
        elif (place := item_of(problem, len(self._owners))) >= 0:
            owners = self._owners[place]
        else:
            return {}
        if not isinstance(problem, BadItem):
            return {owner.job: problem for owner in owners}
        return {owner.job: BadItem(owner.item.info.index, problem.problem) for owner in reversed(owners)}

    # --- what the adapter calls

    def load(self, indices: Sequence[int]) -> View:
        """The features of these items, one after the other; a single item is borrowed where it lies."""
        sources = [self._source(index) for index in indices]
        if len(sources) == 1:
            features, item = sources[0]
            if self._device is None or not isinstance(features.unread(item), wire.Inline):
                with self._reading(indices[0]):
                    self._borrows = True
                    return features.borrow(item)
        forms: list[tuple[str, tuple[int, ...]]] = []
        for index, (features, item) in zip(indices, sources, strict=True):
            with self._reading(index):
                dtype, shape = features.form(item)
                if not shape or (forms and (dtype, shape[1:]) != (forms[0][0], forms[0][1][1:])):
                    wanted = f" in a batch of {forms[0][0]} {forms[0][1][1:]}" if forms else ""
                    raise BadItem(index, f"features of {dtype} {shape}{wanted}")
                forms.append((dtype, shape))
        dtype, width = (forms[0][0], forms[0][1][1:]) if forms else ("float32", (0,))
        batch = View.empty(dtype, (sum(shape[0] for _, shape in forms), *width), self._device)
        start = 0
        for index, (features, item), (_, shape) in zip(indices, sources, forms, strict=True):
            with self._reading(index):
                features.copy(item, batch.rows(start, start + shape[0]))
            start += shape[0]
        self._copied_ns = time.monotonic_ns()
        return batch

    def out(self, index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        """A lease of the rank's own pool, to write an item's output into."""
        made = self._owners[index][0].made if 0 <= index < len(self._owners) else None
        if not (isinstance(name, str) and name.isprintable() and 1 <= len(name) <= wire.MOST_NAME):
            raise BadItem(
                index, f"the adapter asked for output {name!r:.200}; 1 to {wire.MOST_NAME} characters name it"
            )
        if made is None or name in made.outputs:
            raise BadItem(index, f"the adapter asked twice for output {name!r}, or for an item it does not have")
        if len(made.outputs) == wire.MOST_OUTPUTS:
            raise BadItem(index, f"the adapter asked for output {name!r}; an item has {wire.MOST_OUTPUTS} at most")
        return self._draft(made, name, dtype, shape)

    def _source(self, index: int) -> tuple[Features, int]:
        """Where an item's features are, and its number there."""
        if not 0 <= index < len(self._owners) or index in self._loaded:
            raise BadItem(index, "its features were loaded already, or the adapter does not have it")
        self._loaded.add(index)
        first = self._owners[index][0]
        return first.job.features, first.item.info.index

    @contextmanager
    def _reading(self, index: int) -> Iterator[None]:
        try:
            yield
        except FerryError:
            self._lost = index
            raise

    def _draft(self, made: Made, name: str, dtype: str, shape: tuple[int, ...]) -> View:
        draft = made.outputs[name] = self._block.enter_context(self._publisher.draft([(dtype, shape)]))
        return draft.views[0]

    def _copy(self, outputs: Outputs, made: Made) -> None:
        for name, view in outputs.items():
            self._draft(made, name, view.dtype, view.shape).copy_from(view)


def _check(item: ItemInfo, made: Made) -> None:
    """An item has outputs, and rows as its placeholders. Raises BadItem."""
    first = next(iter(made.views.values()), None)
    if first is None:
        raise BadItem(item.index, "the adapter made no output for it")
    if first.shape[:1] != (item.rows,):
        raise BadItem(item.index, f"the adapter made embeddings of shape {first.shape} for {item.rows} rows")

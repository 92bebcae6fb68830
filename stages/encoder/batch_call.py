"""One call of a model adapter for the items of several requests: what the adapter may load, and where it writes."""

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

    With a cache, the adapter gets items of equal content as one item, and items that the cache has not at all. All
    leases belong to `block`, which is closed if the call fails; features that were read stay with their jobs.
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
        self._owners: list[list[_Owner]] = []  # by number: the items of one content; the features of the first are read
        self._known: list[tuple[Made, Outputs]] = []
        self._loaded: set[int] = set()
        self._copies: list[tuple[Content, Outputs]] = []  # for the cache
        self._lost: int | None = None  # the item whose features could not be read
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
                # Without a cache content hashes are not relied on: every item is encoded.
                place = len(self._owners) if cache is None else places.setdefault(item.content, len(self._owners))
                if place == len(self._owners):
                    self._owners.append([])
                self._owners[place].append(_Owner(job, item, made))
        self.items = [replace(owners[0].item.info, index=place) for place, owners in enumerate(self._owners)]

    @property
    def found(self) -> int:
        """How many items have the embeddings of an equal item."""
        return len(self._known) + sum(len(owners) - 1 for owners in self._owners)

    @property
    def copied_ns(self) -> int | None:
        """When the last features were copied, so that none is held; None if one was borrowed, or none copied."""
        return None if self._borrows else self._copied_ns or None

    async def wait_ready(self, reader: Reader, patience_s: float, *, unless: Callable[[], bool]) -> None:
        """Wait until all features that it reads are written, or `unless` is true. Raises as `gpu_wait.wait_ready`."""
        for place, owners in enumerate(self._owners):
            payload = owners[0].job.features.unread(owners[0].item.info.index)
            if isinstance(payload, wire.Proxy):
                try:
                    await wait_ready(reader, [payload], patience_s, unless=unless)
                except FerryError:
                    self._lost = place
                    raise

    def run(self, adapter: ModelAdapter) -> Finish | None:
        """Encode what is not known, and write the embeddings of every item; in the rank's thread.

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
        """Put the embeddings into the cache; called once it is known that the call succeeded."""
        if self._cache is not None:
            for content, copies in self._copies:
                self._cache.put(content, copies)

    def made(self, job: Job) -> Sequence[Made]:
        """What is to be sent for a request, in its own order; after `run`."""
        return self._made[job]

    def understood(self, problem: Exception) -> Exception:
        """The error to report: `problem`, or a ValueError if it names an item that the adapter was not given."""
        if isinstance(problem, BadItem) and item_of(problem, len(self._owners)) < 0:
            said = (
                f"the adapter raised BadItem for item {problem.index!r:.80} of {len(self._owners)}: {text_of(problem)}"
            )
            return ValueError(said)
        return problem

    def at_fault(self, problem: Exception) -> dict[Job, Exception]:
        """The jobs that caused a failure of `run`, of what it returned, or of `wait_ready`, each with its error, by the
        item numbers of its own request; empty if that is not known."""
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
        """The features of these items, one after the other. A single item is borrowed and not copied."""
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
                index,
                f"the adapter asked for output {name!r:.200}; a name is 1 to {wire.MOST_NAME} printable characters",
            )
        if made is None or name in made.outputs:
            raise BadItem(index, f"the adapter asked twice for output {name!r}, or for an item that it was not given")
        if len(made.outputs) == wire.MOST_OUTPUTS:
            raise BadItem(index, f"the adapter asked for output {name!r}; an item may have {wire.MOST_OUTPUTS}")
        return self._draft(made, name, dtype, shape)

    def _source(self, index: int) -> tuple[Features, int]:
        """Where an item's features are, and its number there."""
        if not 0 <= index < len(self._owners) or index in self._loaded:
            raise BadItem(index, "the adapter loaded its features twice, or was not given it")
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
    """Raise BadItem unless an item has an output, with one row for each placeholder."""
    first = next(iter(made.views.values()), None)
    if first is None:
        raise BadItem(item.index, "the adapter made no output for it")
    if first.shape[:1] != (item.rows,):
        raise BadItem(item.index, f"the adapter made embeddings of shape {first.shape} for {item.rows} rows")

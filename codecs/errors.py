"""Every error of tensorferry: one tree, each class a situation, each carrying its numbers.

Arguments, not text, go to `super().__init__`, so an error survives a trip between processes; `str()`
makes the sentence. `RequestError` is the client's fault and is never worth a retry; everything else is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class FerryError(Exception):
    """A problem that a user of tensorferry can understand."""


def text_of(problem: BaseException, most: int = 4096) -> str:
    """What a problem says, as it can travel: at most so many characters, what is no Unicode text escaped.

    Plug-ins raise any exception, also one whose text cannot be read.
    """
    try:
        text = str(problem)
    except Exception as another:
        text = f"({type(another).__name__} while it was put into words)"
    return text.encode(errors="backslashreplace").decode()[:most]


# --- the request is at fault -------------------------------------------------------------------------


class RequestError(FerryError):
    """This one request cannot be served, now or later; others are unaffected."""


class BadItem(RequestError):
    """Item `index` of a request is unusable."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(index, problem)
        self.index, self.problem = index, problem

    def __str__(self) -> str:
        return f"item {self.index}: {self.problem}"


def item_of(problem: BaseException, items: int) -> int:
    """The item, of so many, that a failure names; -1: none, or one that there is not."""
    given = problem.index if isinstance(problem, BadItem) else -1
    return given if type(given) is int and 0 <= given < items else -1


class BadRequest(RequestError):
    """The request as a whole is unusable."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class LethalRequest(RequestError):
    """One process after the other died with this request, so it is given to no other."""

    def __init__(self, deaths: int, last: str) -> None:
        super().__init__(deaths, last)
        self.deaths, self.last = deaths, last

    def __str__(self) -> str:
        return f"{self.deaths} processes in a row died, or fell silent, with this request, {self.last} the last of them"


# --- configuration, start-up ---------------------------------------------------------------------------


UNPLACED = "deployment"  #: the `file` of a ConfigError by one who knows the key alone; who holds the file fills it in


class ConfigError(FerryError):
    """A deployment file says something impossible: `file:line: key: problem`."""

    def __init__(self, file: str, line: int | None, key: str, problem: str) -> None:
        super().__init__(file, line, key, problem)
        self.file, self.line, self.key, self.problem = file, line, key, problem

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.key}: {self.problem}" if self.key else f"{where}: {self.problem}"

    @property
    def each(self) -> tuple[ConfigError, ...]:
        """Every mistake that was found, this one the first."""
        return (self,)


class ConfigErrors(ConfigError):
    """Several mistakes of one deployment file, a line each; `file`, `line`, `key` and `problem` are of the first."""

    def __init__(self, *found: ConfigError) -> None:
        super().__init__(found[0].file, found[0].line, found[0].key, found[0].problem)
        self.args = found
        self._found = found

    def __str__(self) -> str:
        return "\n".join(dict.fromkeys(map(str, self._found)))

    @property
    def each(self) -> tuple[ConfigError, ...]:
        return self._found


def all_of(found: Sequence[ConfigError]) -> ConfigError:
    """One error for one mistake or more."""
    return found[0] if len(found) == 1 else ConfigErrors(*found)


def leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    """Return the exceptions of a group, and of the groups in it, in their order."""
    for problem in group.exceptions:
        if isinstance(problem, ExceptionGroup):
            yield from leaves(problem)
        else:
            yield problem


class ReportError(FerryError):
    """What a replay left in a folder cannot be read, or no page can be made of it: `place: problem`."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(place, problem)
        self.place, self.problem = place, problem

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


class OutputError(FerryError):
    """No file can be written where the user asked for one: `path: problem`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class TraceError(FerryError):
    """A recorded trace cannot be read: `file:line: problem`."""

    def __init__(self, file: str, line: int | None, problem: str) -> None:
        super().__init__(file, line, problem)
        self.file, self.line, self.problem = file, line, problem

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.problem}"


class DeploymentError(FerryError):
    """The deployment as a whole cannot start or go on; the text says why and what to do."""


# --- the wire --------------------------------------------------------------------------------------------


class ProtocolError(FerryError):
    """A peer sent something that is not our protocol; that message is dropped and counted."""


class BadMessage(ProtocolError):
    """Frames that do not decode to a message, or break a limit."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class UnsupportedDtype(ProtocolError):
    """A tensor whose dtype is not on the table of `tensors.py`, or not one of numpy's where an array is wanted."""

    def __init__(
        self, dtype: str, problem: str = "cannot be ferried; see tensorferry.DTYPES for those that can"
    ) -> None:
        super().__init__(dtype, problem)
        self.dtype, self.problem = dtype, problem

    def __str__(self) -> str:
        return f"dtype {self.dtype} {self.problem}"


class BadTensor(ProtocolError):
    """A tensor header whose numbers disagree (shape, dtype, bytes, range)."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


# --- leases ------------------------------------------------------------------------------------------------


class PoolFull(FerryError):
    """No free range is long enough, or no slot is free; wait for a release or go inline."""

    def __init__(self, wanted_nbytes: int, longest_free_nbytes: int, free_slots: int) -> None:
        super().__init__(wanted_nbytes, longest_free_nbytes, free_slots)
        self.wanted_nbytes = wanted_nbytes
        self.longest_free_nbytes = longest_free_nbytes
        self.free_slots = free_slots

    def __str__(self) -> str:
        return (
            f"pool full: wanted {self.wanted_nbytes} bytes, longest free range {self.longest_free_nbytes}, "
            f"free slots {self.free_slots}"
        )


class PoolClosed(FerryError):
    """The pool was closed by this process."""

    def __str__(self) -> str:
        return "the pool is closed"


class LeaseError(FerryError):
    """Something was asked of a lease that its state does not allow."""

    def __init__(self, slot: int, generation: int, problem: str) -> None:
        super().__init__(slot, generation, problem)
        self.slot, self.generation, self.problem = slot, generation, problem

    def __str__(self) -> str:
        return f"lease slot {self.slot} generation {self.generation}: {self.problem}"


class StaleLease(LeaseError):
    """The lease a proxy names is over: its slot has moved on, or it was already acknowledged here."""


class LeasePoisoned(LeaseError):
    """The producer declared that these bytes will never be valid."""


class LeaseNotReady(LeaseError):
    """The producer did not finish writing within the deadline."""


class StreamCapturing(FerryError):
    """The stream records a CUDA graph: replays would read and acknowledge bytes that were lent again long ago."""

    def __init__(self, stream: int) -> None:
        super().__init__(stream)
        self.stream = stream

    def __str__(self) -> str:
        return f"stream {self.stream:#x} records a CUDA graph; open and close leases outside, and copy into its inputs"


class NotStaged(FerryError):
    """A draft in GPU memory has to travel inline, and its bytes are not in host memory yet; see `Draft.stage`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of GPU memory are not staged to the host: stage(), then dispatch once staged"


class PeerGone(FerryError):
    """The process that owns the pool, or that should read from it, is not there."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(peer, problem)
        self.peer, self.problem = peer, problem

    def __str__(self) -> str:
        return f"{self.peer}: {self.problem}"


class AttachRefused(FerryError):
    """Descriptors of a pool or acknowledgement page failed a check (uid, pid, size, seals, magic, nonce)."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class StreamDiverged(FerryError):
    """A request was sent again while its answer was streamed, and the new answer is no continuation of the old one."""

    def __init__(self, token: int, problem: str) -> None:
        super().__init__(token, problem)
        self.token, self.problem = token, problem

    def __str__(self) -> str:
        return f"the answer cannot go on at token {self.token}: {self.problem}; submit the request anew"


class AnswerFailed(FerryError):
    """A streamed answer has no end: its request failed, or was not accepted. `outcome` is the `Failed` or `Busy`."""

    def __init__(self, outcome: object) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        failure = getattr(self.outcome, "failure", None)
        if failure is not None:
            return f"{failure.kind}: {failure.problem}"
        return f"busy: {getattr(self.outcome, 'reason', self.outcome)}"


class SlowClient(FerryError):
    """A client has taken nothing of its streamed answer for too long."""

    def __init__(self, tokens: int, seconds: float) -> None:
        super().__init__(tokens, seconds)
        self.tokens, self.seconds = tokens, seconds

    def __str__(self) -> str:
        return f"the client has taken nothing of its answer for {self.seconds:.0f} s; {self.tokens} tokens wait for it"


class PeerBusy(FerryError):
    """A peer's queue is full; nothing was sent."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.peer = peer

    def __str__(self) -> str:
        return f"{self.peer} does not keep up: its queue is full"


class ChannelClosed(FerryError):
    """The channel was closed by this process; nothing was sent or taken."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address

    def __str__(self) -> str:
        return f"the channel at {self.address} is closed"

"""Every message on the wire, on one page. `docs/protocol.md` says who sends what, when.

A message is one msgpack array: an integer tag, then the fields in the order below; `frames.py` adds the
frames that inline payloads point at. Structs are frozen, carry no behaviour, and are strict: unknown tags,
extra fields and wrong types are refused, and every number has a range. Whether a payload's dtype, shape and
bytes agree is checked where it is opened, still before anything is allocated: a lie there fails its own request,
and the leases of the message's other payloads, and its own, come back. Request ids are 16 bytes, content hashes 32.
Token ids are little-endian int32 bytes. Times are CLOCK_MONOTONIC nanoseconds of the sender's node. A deadline is the
time that is left when the message is sent, in milliseconds, and its receiver counts from arrival.

Version 2 is the last one that changes a struct. From then on a new kind of message is sent only to peers whose
`Hello.capabilities` or `Welcome.capabilities` name it, and leaves the version as it is.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 2
SENDINGS = 256  #: of one submission, by its owner
MAX_OUTPUT_TOKENS = 1 << 20  #: of one request
MOST_CONSUMERS, MOST_USES = 1024, 65536  #: of one lease, and releases of it by one consumer
MOST_SLOTS = 1 << 20  #: of a pool
LAST_NONCE = (1 << 63) - 1
MOST_TOLD = 4096  #: leases or chunks in one message about a pool
MOST_ITEMS = 4096  #: of a request
MOST_OUTPUTS = 64  #: of an item
MOST_PRECOMPUTED = 16  #: of an item that comes with its embeddings
MOST_PARTS = 4096  #: of a prompt
MOST_NAME = 64  #: characters
MOST_TEXT = 1 << 22  #: characters of a part
MOST_TOKENS_NBYTES = 1 << 24  #: of a part
MOST_FRAMES = 65535  #: of a video
MOST_RANKS = 1024  #: of one assignment, or one attention group
MOST_FEATURES = 16  #: named tensors that an encoder reads of one item
MOST_STOPS = 64  #: texts, or token ids, that end an answer
MOST_TOP = 20  #: alternatives whose probability is told, of each token
MOST_DELTA_TOKENS = 4096  #: in one message
MOST_TENANT = 128  #: characters

Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  #: of the sender's CLOCK_MONOTONIC
Generation = Annotated[int, Meta(ge=1, lt=1 << 31)]
Serial = Annotated[int, Meta(ge=1, lt=1 << 32)]  #: of a chunk; no other of its pool ever has it
Serials = Annotated[tuple[Serial, ...], Meta(max_length=MOST_TOLD)]
Named = Annotated[tuple[tuple[Index, Generation], ...], Meta(max_length=MOST_TOLD)]  #: leases: slot and generation
Nonce = Annotated[int, Meta(ge=1, le=LAST_NONCE)]  #: random, never 0: one life of a process, or one pool
Natural = Annotated[int, Meta(ge=0, le=LAST_NONCE)]
Life = Annotated[int, Meta(ge=0, le=LAST_NONCE)]  #: the epoch of a process, or 0: a client, which has none
Submission = Annotated[int, Meta(ge=0, lt=1 << 23)]  #: how often a client has sent a request before
#: Orders what was sent of a request: its submission times `SENDINGS`, and how often its owner has sent it before.
Attempt = Index
RequestId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]  #: left when the message is sent
TokenIds = Annotated[bytes, Meta(max_length=MOST_TOKENS_NBYTES)]  #: int32, little endian, 4 bytes each
TokenId = Index
Tenant = Annotated[str, Meta(max_length=MOST_TENANT)]
Priority = Annotated[int, Meta(ge=-100, le=100)]  #: lower ones are served first
Finish = Annotated[str, Meta(max_length=MOST_NAME)]  #: why an answer ended: stop, length, ...; empty: not said
Name = Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
Address = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Answer = Annotated[str, Meta(max_length=1 << 24)]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=8)]
Dtype = Annotated[int, Meta(ge=0, lt=256)]  #: a code of `tensors.DTYPES`, its place in that table
# What is many in a message is bounded: a header of 32 MiB, full of the smallest of something, would take ten times its
# size and hold up its receiver for seconds.
Capabilities = Annotated[tuple[Name, ...], Meta(max_length=64)]
Gauges = Annotated[tuple["Gauge", ...], Meta(max_length=256)]
Marks = Annotated[tuple["Mark", ...], Meta(max_length=2048)]
Ranks = Annotated[tuple["Rank", ...], Meta(max_length=MOST_RANKS)]
Logprobs = Annotated[tuple["TokenLogprob", ...], Meta(max_length=MAX_OUTPUT_TOKENS)]
Grid = tuple[Index, Index, Index]  #: patches along time, height, width
#: Frames a second, exactly: numerator and denominator, such as (30000, 1001). A numerator of 0: not known.
Rate = tuple[Index, Generation]
#: W3C's traceparent as bytes: trace id 16, span id 8, flags 1 (see `pipeline/telemetry/traceparent.py`).
TraceContext = Annotated[bytes, Meta(min_length=25, max_length=25)]


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all wire structs share."""


# --- payloads: how a tensor's bytes travel ------------------------------------------------------------------


class Proxy(Wire, frozen=True, tag=1):
    """The bytes lie in a pool. Everything that belongs to the pool was announced once, in `Pool`."""

    pool: Nonce
    slot: Index
    generation: Generation
    offset: Count  #: bytes from the start of the pool
    dtype: Dtype
    shape: Shape
    consumers: Annotated[int, Meta(ge=1, le=MOST_CONSUMERS)] = 1  #: how many processes this lease waits for
    uses: Annotated[int, Meta(ge=1, le=MOST_USES)] = 1  #: releases by this receiver that make its one acknowledgement


class Inline(Wire, frozen=True, tag=2):
    """The bytes are frame `frame` of this multipart message (0 is the first after the header)."""

    frame: Annotated[int, Meta(ge=0, lt=65536)]
    dtype: Dtype
    shape: Shape


Payload = Proxy | Inline


class Tensor(Wire, frozen=True):
    """One named tensor of an item: a feature that an encoder reads, or an output that it made."""

    name: Name
    payload: Payload


# --- who is there -----------------------------------------------------------------------------------------------


class Origin(Wire, frozen=True):
    """One life of one process."""

    stage: Name  #: tokenizer, encoder, scheduler or client
    rank: Index
    epoch: Nonce


class PoolDescription(Wire, frozen=True):
    """What a consumer must know of a pool once, to read any proxy of it."""

    pool: Nonce
    memory: Name  #: host, cuda_ipc or cuda_vmm
    nbytes: Count
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    chunk_nbytes: Count = 0  #: of each chunk of an elastic pool; 0: all of the memory is there all the time


class Hello(Wire, frozen=True, tag=10):
    """First message to a peer: who I am, what I speak, where I take answers."""

    version: Index
    origin: Origin
    inbox: Address
    capabilities: Capabilities = ()
    #: Of the machine's present boot (Linux's boot_id): processes of the same one can share memory. Empty: not said.
    boot: Annotated[bytes, Meta(max_length=16)] = b""
    #: A digest of the settings that every process of a deployment must agree on. Empty: not said.
    deployment: Annotated[bytes, Meta(max_length=32)] = b""


class Welcome(Wire, frozen=True, tag=11):
    """Answer to a Hello; `refusal` says why the peer is not accepted."""

    version: Index
    origin: Origin
    to: Nonce  #: epoch of the Hello answered
    capabilities: Capabilities = ()
    refusal: Text = ""


class Pool(Wire, frozen=True, tag=12):
    """My pool is populated; attach to it at the broker's UNIX socket."""

    origin: Origin
    description: PoolDescription
    broker: Address


class Ready(Wire, frozen=True, tag=13):
    """I can take your work: weights are loaded and your pool, if you announced one, is mapped or refused."""

    origin: Origin
    to: Nonce
    refusal: Text = ""  #: why your pool cannot be read here; send me inline payloads


class Gauge(Wire, frozen=True):
    """A number of a process's own, such as `pool_peak_lent_nbytes`."""

    name: Name
    value: float


class Heartbeat(Wire, frozen=True, tag=14):
    origin: Origin
    in_flight: Count  #: requests this process has accepted and not finished
    gauges: Gauges = ()


class Member(Wire, frozen=True):
    """One process as the tokenizer knows it; the tokenizer itself is the first."""

    stage: Name
    rank: Index
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  #: 0: never seen
    state: Name  #: waiting, ready, quarantined, leaving, gone
    gauges: Gauges = ()  #: of its last heartbeat


class Members(Wire, frozen=True, tag=15):
    """A tokenizer's view of the deployment, to its clients: at their Hello and at every change."""

    origin: Origin
    ready: bool
    members: Annotated[tuple[Member, ...], Meta(max_length=1 << 17)]


class Chunk(Wire, frozen=True):
    """A chunk of an elastic pool, and where it is."""

    position: Index
    serial: Serial
    handle: Annotated[bytes, Meta(max_length=64)] = b""  #: CUmemFabricHandle; empty: a descriptor comes by the line


class Chunks(Wire, frozen=True, tag=16):
    """These chunks were mapped. Said again until `Released.taken` has them."""

    pool: Nonce
    to: Nonce  #: the consumer's epoch
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MOST_TOLD)]


class Retired(Wire, frozen=True, tag=17):
    """These chunks take no more leases: drop them. Said again until `Released.dropped` has them."""

    pool: Nonce
    to: Nonce
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MOST_TOLD)]


class Released(Wire, frozen=True, tag=18):
    """Acknowledgements by message, of a consumer that shares no pages with the pool. Leases: said again until
    `Confirmed`; chunks: in answer to `Chunks` and `Retired`, each time."""

    pool: Nonce
    consumer: Nonce  #: its epoch
    leases: Named
    taken: Serials = ()
    dropped: Serials = ()  #: nothing is held of these any more


class Confirmed(Wire, frozen=True, tag=21):
    """These acknowledgements have come, now or before."""

    pool: Nonce
    to: Nonce
    leases: Named


class Withdrawn(Wire, frozen=True, tag=22):
    """The connection broke, so proxies of these leases may be lost: acknowledge those that you do not read just now.

    One that comes after all is stale then.
    """

    pool: Nonce
    to: Nonce
    leases: Named


class Drain(Wire, frozen=True, tag=19):
    """I am leaving: send me nothing new."""

    origin: Origin


class Drained(Wire, frozen=True, tag=20):
    """I have left; nothing of yours is still with me."""

    origin: Origin


# --- client <-> tokenizer ---------------------------------------------------------------------------------------


class TextPart(Wire, frozen=True, tag=1):
    text: Annotated[str, Meta(max_length=MOST_TEXT)]


class TokensPart(Wire, frozen=True, tag=2):
    ids: TokenIds


class ImagePart(Wire, frozen=True, tag=3):
    """An encoded image (JPEG, PNG, ...): frame `frame` of this message."""

    frame: Annotated[int, Meta(ge=0, lt=65536)]


class VideoPart(Wire, frozen=True, tag=4):
    """A video, one item: encoded pictures of one size, frames `first .. first+count` of this message, in order."""

    first: Annotated[int, Meta(ge=0, lt=65536)]
    count: Annotated[int, Meta(ge=1, le=MOST_FRAMES)]
    rate: Rate = (0, 1)


class AnimationPart(Wire, frozen=True, tag=5):
    """A video, one item: frame `frame` of this message, an animated file (GIF, PNG, WebP) with its own timing."""

    frame: Annotated[int, Meta(ge=0, lt=65536)]


class EmbeddingsPart(Wire, frozen=True, tag=6):
    """An item whose embeddings were made elsewhere, and which no encoder sees; `embeddings`, (rows, width), first."""

    outputs: Annotated[tuple[Tensor, ...], Meta(min_length=1, max_length=MOST_PRECOMPUTED)]  #: inline, all of them
    modality: Name = "image"  #: image or video: whose placeholders stand for it
    grid: Grid = (0, 0, 0)  #: of the patches that it was encoded from; (0, 0, 0): not known


class AudioPart(Wire, frozen=True, tag=7):
    """An encoded sound (WAV, FLAC, ...), one item: frame `frame` of this message."""

    frame: Annotated[int, Meta(ge=0, lt=65536)]


class VideoFilePart(Wire, frozen=True, tag=8):
    """An encoded video file (MP4, ...) with its own timing, one item: frame `frame` of this message."""

    frame: Annotated[int, Meta(ge=0, lt=65536)]


class ImageRef(Wire, frozen=True, tag=9):
    """An image that the deployment has seen before: the SHA-256 of its file."""

    file_hash: Hash


Part = (
    TextPart | TokensPart | ImagePart | VideoPart | AnimationPart | EmbeddingsPart
    | AudioPart | VideoFilePart | ImageRef
)  # fmt: skip


class Sampling(Wire, frozen=True):
    """How an engine chooses the tokens of an answer. The defaults choose the likeliest one, always."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Index = 0  #: 0: all tokens
    seed: Natural | None = None
    stop: Annotated[tuple[Name, ...], Meta(max_length=MOST_STOPS)] = ()
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MOST_STOPS)] = ()
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] = 0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    logprobs: Annotated[int, Meta(ge=-1, le=MOST_TOP)] = -1  #: alternatives to tell of each token; -1: no probability
    adapter: Annotated[str, Meta(max_length=MOST_TENANT)] = ""  #: a LoRA adapter's name; empty: the model itself

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"`{name}` is {getattr(self, name)}, which is no number")


class Submit(Wire, frozen=True, tag=30):
    request: RequestId
    attempt: Submission
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=MOST_PARTS)]
    output_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]  #: of the answer, at most
    deadline_ms: Milliseconds  #: afterwards the request fails
    context: TraceContext | None = None  #: the client's
    sampling: Sampling | None = None  #: None: the defaults
    stream: bool = False  #: send a `Delta` as soon as there are tokens, and the `Result` after them all the same
    priority: Priority = 0
    tenant: Tenant = ""  #: whose request it is; tenants share an engine fairly


class Mark(Wire, frozen=True):
    """`step` was reached at `at_ns`."""

    step: Name
    at_ns: Nanoseconds


class ItemReport(Wire, frozen=True):
    """What became of one item, in request order."""

    #: Encoder rank that encoded it; -1: none, its embeddings came with the request.
    rank: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    grid: Grid
    rows: Count
    transport: Name  #: how its features (or such embeddings) travelled: shm, cuda_ipc, cuda_vmm or inline
    nbytes: Count  #: of these
    digest: Annotated[bytes, Meta(max_length=64)]  #: what the engine made of its embeddings; empty from most


class TokenLogprob(Wire, frozen=True):
    """The logarithm of the probability that a token of an answer had, and of the likeliest alternatives."""

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MOST_TOP)] = ()


class Result(Wire, frozen=True, tag=31):
    request: RequestId
    attempt: Submission
    prompt_tokens: Count
    output_tokens: Count
    items: Annotated[tuple[ItemReport, ...], Meta(max_length=MOST_ITEMS)]
    marks: Marks
    token_ids: TokenIds = b""  #: the answer, all of it; often empty
    text: Answer = ""  #: the answer, where the engine makes it text
    finish: Finish = ""
    cached_tokens: Count = 0  #: of the prompt, which the engine had computed before
    logprobs: Logprobs = ()  #: one per token, if they were asked for


class Failure(Wire, frozen=True):
    """Why a request failed; `kind` is the class name of the error."""

    kind: Name
    problem: Text
    origin: Origin
    item: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1  #: index of the item at fault, -1: none
    retryable: bool = False


class Failed(Wire, frozen=True, tag=32):
    """Encoder or scheduler to the request owner, and the owner to its client."""

    request: RequestId
    attempt: Attempt  #: to a client: the submission
    failure: Failure
    to: Life = 0


class Busy(Wire, frozen=True, tag=33):
    """Not accepted: a limit is reached, or the deployment is draining. Try again after `retry_ms`."""

    request: RequestId
    attempt: Submission
    retry_ms: Annotated[int, Meta(ge=0, le=86_400_000)]
    reason: Text


class Cancel(Wire, frozen=True, tag=34):
    """A client to the owner, and the owner to everybody it told: drop this attempt, and older ones."""

    request: RequestId
    attempt: Attempt  #: from a client: the submission
    to: Life = 0  #: 0 from a client


# --- tokenizer -> scheduler, tokenizer -> encoder -> scheduler --------------------------------------------------


class Span(Wire, frozen=True):
    """An item's placeholders are tokens `offset .. offset+length`."""

    offset: Index
    length: Index


class Rank(Wire, frozen=True):
    """A rank and the life of it that was meant."""

    rank: Index
    epoch: Nonce


class PlacedItem(Wire, frozen=True):
    """What an engine must know of an item besides its embeddings."""

    modality: Name  #: image, video or audio
    grid: Grid  #: (0, 0, 0): not known, its embeddings came with the request
    content_hash: Hash
    spans: Annotated[tuple[Span, ...], Meta(min_length=1, max_length=MOST_FRAMES)]  #: as many tokens as it has rows


class Admit(Wire, frozen=True, tag=40):
    """A request comes: its tokens, and which items' embeddings to wait for."""

    request: RequestId
    attempt: Attempt
    to: Nonce
    owner: Origin
    schedulers: Ranks  #: the attention group, in order
    token_ids: TokenIds
    items: Annotated[tuple[PlacedItem, ...], Meta(max_length=MOST_ITEMS)]  #: all of the request, in order
    output_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
    deadline_ms: Milliseconds
    context: TraceContext | None = None  #: the request's own, or its client's
    sampling: Sampling | None = None  #: this and what follows, as in Submit
    stream: bool = False
    priority: Priority = 0
    tenant: Tenant = ""


class Item(Wire, frozen=True):
    modality: Name  #: image, video or audio
    grid: Grid  #: their product is the number of patches; 0: nobody encodes it, its embeddings came with the request
    rows: Count  #: placeholder tokens, so rows of its embeddings
    content_hash: Hash
    #: By name, such as pixel values; of one lease, if they are proxies. Empty unless the receiver owns the item.
    features: Annotated[tuple[Tensor, ...], Meta(max_length=MOST_FEATURES)]


class Encode(Wire, frozen=True, tag=41):
    """Encode those of a request's items that the assignment gives you."""

    request: RequestId
    attempt: Attempt
    to: Nonce
    owner: Origin
    encoders: Ranks  #: every rank of the assignment, in order
    schedulers: Ranks  #: who gets the embeddings
    items: Annotated[tuple[Item, ...], Meta(max_length=MOST_ITEMS)]  #: all of the request, in order
    deadline_ms: Milliseconds
    #: These alone are assigned: their first owners are gone. None: all are.
    anew: Annotated[tuple[Index, ...], Meta(max_length=MOST_ITEMS)] = ()
    context: TraceContext | None = None  #: as in Admit
    #: The place in `encoders` of each assigned item, where the owner of the request chose. Empty: it is computed.
    owners: Annotated[tuple[Index, ...], Meta(max_length=MOST_ITEMS)] = ()


class Embedding(Wire, frozen=True):
    index: Index
    rows: Count
    outputs: Annotated[tuple[Tensor, ...], Meta(max_length=MOST_OUTPUTS)]


class Embeddings(Wire, frozen=True, tag=42):
    request: RequestId
    attempt: Attempt
    to: Nonce
    origin: Origin
    items: Annotated[tuple[Embedding, ...], Meta(max_length=MOST_ITEMS)]
    marks: Marks


class Done(Wire, frozen=True, tag=43):
    """A scheduler rank has finished a request."""

    request: RequestId
    attempt: Attempt
    to: Nonce
    origin: Origin
    output_tokens: Count
    #: One per item, in order.
    digests: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=MOST_ITEMS)]
    marks: Marks
    token_ids: TokenIds = b""  #: this and what follows, as in Result
    text: Answer = ""
    finish: Finish = ""
    cached_tokens: Count = 0
    logprobs: Logprobs = ()


class Delta(Wire, frozen=True, tag=45):
    """A stretch of an answer, as soon as the engine has made it: scheduler to owner, owner to client."""

    request: RequestId
    attempt: Attempt  #: to a client: the submission
    to: Life  #: 0 to a client
    origin: Origin
    first: Annotated[int, Meta(ge=0, lt=MAX_OUTPUT_TOKENS)]  #: how many tokens of the answer come before these
    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MOST_DELTA_TOKENS)]
    #: When the engine gave out each, of the clock of its node.
    at_ns: Annotated[tuple[Nanoseconds, ...], Meta(min_length=1, max_length=MOST_DELTA_TOKENS)]
    text: Answer = ""  #: what they add to the text: empty while a character is incomplete
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MOST_DELTA_TOKENS)] = ()


class Collected(Wire, frozen=True, tag=44):
    """A scheduler rank has all that it needs of a request: its encoders may die."""

    request: RequestId
    attempt: Attempt
    to: Nonce
    origin: Origin


Message = (
    Hello | Welcome | Pool | Ready | Heartbeat | Members | Chunks | Retired | Released | Confirmed | Withdrawn
    | Drain | Drained
    | Submit | Result | Failed | Busy | Cancel | Admit | Encode | Embeddings | Done
    | Collected | Delta
)  # fmt: skip

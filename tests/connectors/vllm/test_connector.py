"""The connector against a fake of vLLM's interface: real processes, pools and sockets, one process for each part."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.conftest import Peer

from tensorferry.connectors.ec import messages as wire

pytestmark = [pytest.mark.timeout(90), pytest.mark.slow]

PATIENCE_S = 2.0
LARGE, SMALL = 8192, 4  #: rows of 32 bytes: by proxy, and inline
GRID = {"image_grid_thw": [1, 2, 2]}


class Engines:
    """Starts parts of engines in a folder of their own."""

    def __init__(self, start_peer: Callable[..., Any], spares: list[Any], until: Callable[..., None], folder: Path):
        self._start_peer, self._spares, self.until, self.folder = start_peer, spares, until, folder
        self._used: list[Any] = []
        self._own: list[Any] = []  # that die with this test
        self.mortal = False  #: the processes that are started from now on will be killed

    def reset(self) -> None:
        """Processes that were not killed are as they were at first, and of use to the next test."""
        for peer in self._used:
            peer.ask("reset")
        self._spares += [peer for peer in self._used if peer not in self._own]

    def part(self, role: str, ec_role: str, more: dict[str, Any] | None = None, **extra: Any) -> Any:
        if self._spares and not self.mortal:
            peer = self._spares.pop()
        else:
            peer = self._start_peer("ec_engine.py", "default")
            self._own.append(peer)
        if not self.mortal:
            self._used.append(peer)
        settings = {"folder": str(self.folder), "patience_s": PATIENCE_S, "scan_s": 0.1, "budget_mb": 8} | extra
        peer.ask("connect_with", role, ec_role, settings, more or {})
        return peer

    def producer(self, **extra: Any) -> Any:
        more = extra.pop("more", {})
        return self.part("WORKER", "ec_producer", more, **extra)

    def consumer(self, ranks: int = 1, **extra: Any) -> Consumer:
        more = {"ranks": ranks, **extra.pop("more", {})}
        core = self.part("SCHEDULER", "ec_consumer", more, **extra)
        workers = [self.part("WORKER", "ec_consumer", {"rank": rank} | more, **extra) for rank in range(ranks)]
        return Consumer(core, workers, self.until)


class Consumer:
    """A core and its workers."""

    def __init__(self, core: Any, workers: list[Any], until: Callable[..., None]) -> None:
        self.core, self.workers, self._until = core, workers, until
        self.requests = 0
        self.scheduled: set[str] = set()
        self.failures: set[str] = set()
        self.loaded: list[dict[str, str]] = [{} for _ in workers]  #: digests, by rank

    def found(self, producers: int) -> None:
        """Wait until its workers may ask so many producers."""
        for worker in self.workers:
            self._until(lambda worker=worker: worker.ask("statistics")["producers"] == producers)

    def admit(self, *items: tuple[str, int], data: Any = GRID) -> str:
        self.requests += 1
        name = f"request-{self.requests}"
        self.core.ask("admit", name, [(item, rows, data) for item, rows in items])
        return name

    def step(self) -> dict[str, Any]:
        """One step of the core and its workers."""
        step: dict[str, Any] = self.core.ask("schedule")
        assert not step["encodes"], "an engine without the image ends here"
        self.scheduled.update(step["scheduled"])
        self.failures.update(step["failed"])
        if step["scheduled"]:
            for worker, loaded in zip(self.workers, self.loaded, strict=True):
                loaded.update(worker.ask("run", step["step"]))
        return step

    def served(self, request: str) -> list[dict[str, str]]:
        """Step until a request is scheduled; what each rank has loaded since the last call."""

        def ran() -> bool:
            if request not in self.scheduled:
                self.step()
            assert request not in self.failures
            return request in self.scheduled

        self._until(ran)
        loaded, self.loaded = self.loaded, [{} for _ in self.workers]
        return loaded

    def failed(self, request: str) -> None:
        """Step until a request has failed, with the core alive."""

        def ended() -> bool:
            if request not in self.failures:
                self.step()
            assert request not in self.scheduled
            return request in self.failures

        self._until(ended)

    def finish(self, request: str) -> None:
        self.core.ask("finish", request)

    def ends_empty(self) -> None:
        """Nothing is claimed, and once the workers have heard of it, nothing is held."""
        assert self.core.ask("claims") == 0
        step = self.core.ask("flush")
        for worker in self.workers:
            worker.ask("run", step)
            self._until(
                lambda worker=worker: not {"held", "wanted"} & {k for k, v in worker.ask("statistics").items() if v}
            )


@pytest.fixture(scope="module")
def spares(may_start_processes: None) -> Iterator[list[Any]]:
    """Processes that tests use one after the other, since each takes seconds to import torch."""
    with ExitStack() as stack:
        yield [stack.enter_context(Peer("ec_engine.py", "default")) for _ in range(4)]


@pytest.fixture
def engines(start_peer: Callable[..., Any], spares: list[Any], until: Callable[..., None]) -> Iterator[Engines]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        made = Engines(start_peer, spares, until, Path(folder) / "ec")
        yield made
        made.reset()
        assert not list(made.folder.glob("*")) or made.mortal, "sockets are left"


def empty(engines: Engines, producer: Any) -> None:
    """Nothing of the producer's is lent, once it keeps nothing."""
    engines.until(lambda: producer.ask("statistics")["kept"] == 0)
    engines.until(lambda: producer.ask("statistics")["lent"] == 0)


def test_outputs_large_and_small_load_as_they_were_made(engines: Engines) -> None:
    producer, consumer = engines.producer(keep_s=1.0), engines.consumer()
    consumer.found(1)
    made = {"large": producer.ask("encode", "large", 1, LARGE), "small": producer.ask("encode", "small", 2, SMALL)}
    request = consumer.admit(("large", LARGE), ("small", SMALL))
    assert consumer.served(request) == [made]
    statistics = consumer.workers[0].ask("statistics")
    assert (statistics["by_proxy"], statistics["inline"]) == (1, 1)
    consumer.finish(request)
    consumer.ends_empty()
    empty(engines, producer)


def test_an_item_that_is_asked_for_first_is_deferred_and_then_served(engines: Engines) -> None:
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    request = consumer.admit(("late", LARGE))
    for _ in range(3):
        assert not consumer.step()["scheduled"]
    engines.until(lambda: producer.ask("statistics")["wanted"] == 1)
    made = producer.ask("encode", "late", 1, LARGE)
    assert consumer.served(request) == [{"late": made}]


def test_an_item_that_nobody_makes_fails_its_request_alone(engines: Engines) -> None:
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    never, good = consumer.admit(("never", LARGE)), consumer.admit(("made", LARGE))
    made = producer.ask("encode", "made", 1, LARGE)
    assert consumer.served(good) == [{"made": made}]
    consumer.failed(never)
    consumer.finish(good)
    consumer.ends_empty()
    again = consumer.admit(("never", LARGE))
    made = producer.ask("encode", "never", 2, LARGE)
    assert consumer.served(again) == [{"never": made}]


def test_a_hash_that_comes_again_is_served_again(engines: Engines) -> None:
    """From what the engine has in its cache; when that has evicted it, from what the producer keeps."""
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    for round_ in range(3):
        request = consumer.admit(("x", LARGE))
        assert consumer.served(request) == [{"x": made} if round_ in (0, 2) else {}]
        consumer.finish(request)
        if round_ == 1:
            consumer.ends_empty()
            consumer.core.ask("evict", "x")
            consumer.workers[0].ask("evict", "x")
    assert producer.ask("statistics")["sent"] == 2


def test_two_requests_of_one_item_and_one_item_twice_in_a_request(engines: Engines) -> None:
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    first, second = consumer.admit(("x", LARGE), ("x", LARGE)), consumer.admit(("x", LARGE))
    made = producer.ask("encode", "x", 1, LARGE)
    assert consumer.served(first) == [{"x": made}]
    consumer.served(second)
    consumer.core.ask("computed", first, 0)  # its second place is still to come
    consumer.finish(second)
    assert consumer.core.ask("claims") == 1
    consumer.core.ask("computed", first, 1)
    assert consumer.core.ask("claims") == 0
    consumer.finish(first)
    consumer.ends_empty()


def test_an_item_that_the_producer_has_forgotten_fails_and_is_served_once_it_is_offered_again(engines: Engines) -> None:
    """The producer's engine has it in its cache: it encodes nothing when the request comes to it again."""
    producer, consumer = engines.producer(keep_s=0.1), engines.consumer()
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    engines.until(lambda: producer.ask("statistics")["kept"] == 0)
    request = consumer.admit(("x", LARGE))
    consumer.failed(request)
    request = consumer.admit(("x", LARGE))
    consumer.step()
    producer.ask("run", {"loads": [], "let_go": [], "offers": ["x", "unknown"]})
    assert consumer.served(request) == [{"x": made}]


def test_a_full_pool_makes_outputs_travel_inline(engines: Engines) -> None:
    """Of 8 MiB, in outputs of 3: the third makes the first go. One that is larger than all of it goes inline."""
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    rows = 3 << 15  # of 32 bytes
    made = {f"x{number}": producer.ask("encode", f"x{number}", number, rows) for number in range(3)}
    assert producer.ask("statistics")["kept"] == 2
    made["vast"] = producer.ask("encode", "vast", 9, 3 * rows)
    assert producer.ask("statistics") | {"kept": 1, "pool_full": 1} == producer.ask("statistics")
    request = consumer.admit(("vast", 3 * rows))
    assert consumer.served(request) == [{"vast": made["vast"]}]
    assert consumer.workers[0].ask("statistics")["inline"] == 1


def test_without_a_pool_everything_goes_inline(engines: Engines) -> None:
    producer, consumer = engines.producer(memory="none"), engines.consumer()
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    assert consumer.served(consumer.admit(("x", LARGE))) == [{"x": made}]


def test_each_rank_of_an_engine_reads_in_its_own_column(engines: Engines) -> None:
    """An item counts as held once all ranks hold it: with one of them stopped, its request is deferred."""
    producer, consumer = engines.producer(keep_s=1.0), engines.consumer(ranks=2)
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    assert producer.ask("statistics")["consumers"] == 2
    request = consumer.admit(("x", LARGE))
    assert consumer.served(request) == [{"x": made}, {"x": made}]
    consumer.workers[1].stop()
    another = consumer.admit(("y", LARGE))
    producer.ask("encode", "y", 2, LARGE)
    consumer.core.ask("schedule")
    engines.until(lambda: consumer.workers[0].ask("statistics")["by_proxy"] == 2)
    for _ in range(5):
        assert not consumer.core.ask("schedule")["scheduled"]
    consumer.workers[1].signal(18)  # SIGCONT
    consumer.served(another)
    for name in (request, another):
        consumer.finish(name)
    consumer.ends_empty()
    empty(engines, producer)


def test_a_producer_that_is_killed_takes_nothing_that_has_come(engines: Engines) -> None:
    """What was held is served, what was not fails by patience, and its successor serves again."""
    engines.mortal = True
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    here, lost = consumer.admit(("x", LARGE)), consumer.admit(("y", LARGE))
    consumer.core.ask("schedule")
    engines.until(lambda: consumer.workers[0].ask("statistics")["held"] == 1)
    producer.kill()
    assert consumer.served(here) == [{"x": made}]
    consumer.failed(lost)
    successor = engines.producer()
    consumer.found(1)
    again = consumer.admit(("y", LARGE))
    made = successor.ask("encode", "y", 2, LARGE)
    assert consumer.served(again) == [{"y": made}]


def test_a_request_waits_for_the_successor_of_a_producer_that_was_killed(engines: Engines) -> None:
    engines.mortal = True
    producer, consumer = engines.producer(), engines.consumer(patience_s=20.0)
    consumer.found(1)
    request = consumer.admit(("x", LARGE))
    consumer.step()
    producer.kill()
    made = engines.producer().ask("encode", "x", 1, LARGE)
    assert consumer.served(request) == [{"x": made}]


def test_a_consumer_that_is_killed_gives_everything_back(engines: Engines) -> None:
    """Stopped before it can read: its lease is out until the kernel says that it is dead."""
    engines.mortal = True
    producer, consumer = engines.producer(keep_s=1.0), engines.consumer()
    consumer.found(1)
    consumer.admit(("x", LARGE))
    consumer.step()
    engines.until(lambda: producer.ask("statistics")["wanted"] == 1)
    consumer.workers[0].stop()
    producer.ask("encode", "x", 1, LARGE)
    engines.until(lambda: producer.ask("statistics")["kept"] == 0)
    assert producer.ask("statistics")["lent"] == 1
    consumer.workers[0].kill()
    engines.until(lambda: producer.ask("statistics")["lent"] == 0)
    engines.until(lambda: producer.ask("statistics")["consumers"] == 0)


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"name": "another"}, {"config": {"layers": 3}}, {"width": 16}], ids=str
)
def test_engines_of_another_model_or_dtype_hand_nothing_over(engines: Engines, other: dict[str, Any]) -> None:
    """Each request fails by patience; a producer of the same model serves the next one."""
    stranger, consumer = engines.producer(more=other), engines.consumer()
    stranger.ask("encode", "x", 1, LARGE, other.get("width", 8), other.get("dtype", "float32"))
    request = consumer.admit(("x", LARGE))
    consumer.failed(request)
    made = engines.producer().ask("encode", "x", 2, LARGE)
    assert consumer.served(consumer.admit(("x", LARGE))) == [{"x": made}]
    assert stranger.ask("statistics")["sent"] == 0


@pytest.mark.parametrize(("rows", "width", "dtype"), [(LARGE, 12, "float32"), (LARGE, 8, "float16")])
def test_an_output_of_another_width_or_dtype_fails_its_request_at_once(
    engines: Engines, rows: int, width: int, dtype: str
) -> None:
    """An engine that gathers such rows dies of them."""
    producer, consumer = engines.producer(), engines.consumer(patience_s=1000.0)
    consumer.found(1)
    producer.ask("encode", "x", 1, rows, width, dtype)
    consumer.failed(consumer.admit(("x", LARGE)))
    consumer.ends_empty()


def test_a_request_with_room_for_other_rows_fails_at_once_and_alone(engines: Engines) -> None:
    """It fails before anything is gathered for it."""
    producer, consumer = engines.producer(), engines.consumer(patience_s=1000.0)
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    wrong, right = consumer.admit(("x", LARGE + 1)), consumer.admit(("x", LARGE))
    assert consumer.served(right) == [{"x": made}]
    consumer.failed(wrong)


def test_an_engine_with_a_tower_and_the_image_encodes_what_is_missing(engines: Engines) -> None:
    consumer = engines.consumer(on_missing="encode", patience_s=0.2)
    with_image = consumer.admit(("x", LARGE), data={"pixel_values": 0, **GRID})
    without = consumer.admit(("y", LARGE))
    steps: list[dict[str, Any]] = []

    def both_ended() -> bool:
        steps.append(consumer.core.ask("schedule"))
        return sum(len(step["scheduled"]) + len(step["failed"]) for step in steps) == 2

    engines.until(both_ended)
    assert [name for step in steps for name in step["scheduled"]] == [with_image]
    assert [name for step in steps for name in step["encodes"]] == ["x"]
    assert [name for step in steps for name in step["failed"]] == [without]


def test_no_call_waits_for_a_peer_that_is_stopped(engines: Engines) -> None:
    """Each of these would hang for as long as the peer does not go on: the test's own deadline is what fails."""
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    consumer.workers[0].stop()
    for number in range(40):  # more than the pool has room for
        producer.ask("encode", f"x{number}", number, LARGE)
    request = consumer.admit(*((f"x{number}", LARGE) for number in range(40)))
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S / 2:
        assert not consumer.core.ask("schedule")["scheduled"]
    consumer.workers[0].signal(18)  # SIGCONT
    producer.stop()
    consumer.failed(request)
    producer.signal(18)


def test_consumers_on_other_machines_come_by_tcp_and_read_inline(engines: Engines) -> None:
    port = 20000 + os.getpid() % 20000
    address = f"tcp://127.0.0.1:{port}"
    producer = engines.producer(listen=address)
    engines.folder = engines.folder.with_name("elsewhere")
    consumer = engines.consumer(producers=[address])
    consumer.found(1)
    made = producer.ask("encode", "x", 1, LARGE)
    assert consumer.served(consumer.admit(("x", LARGE))) == [{"x": made}]
    assert consumer.workers[0].ask("statistics")["inline"] == 1


def test_what_is_no_message_of_a_peer_changes_nothing(engines: Engines) -> None:
    """At the producer's door and at the scheduler's: bytes, messages of the other side, and wishes without a Hello."""
    producer, consumer = engines.producer(), engines.consumer()
    consumer.found(1)
    messages = [wire.encode(message) for message in (wire.Want(("x",), 1000), wire.Held("x", 1, 0, 9), wire.Here(7, 9))]
    with zmq.Context() as context:
        for path in engines.folder.glob("*.[pe][rn][og]*"):
            with context.socket(zmq.DEALER) as stranger:
                stranger.connect(f"ipc://{path}")
                for frames in [[b""], [b"\xc1" * 100], [b"x"] * 9, [b"x", bytes(1 << 20)], *messages]:
                    stranger.send_multipart(frames)
                stranger.close(linger=2000)
    request = consumer.admit(("x", LARGE))
    assert not consumer.step()["scheduled"]
    made = producer.ask("encode", "x", 1, LARGE)
    assert consumer.served(request) == [{"x": made}]


def test_what_cannot_be_is_refused_by_name(engines: Engines, refused: Callable[..., Any]) -> None:
    with refused("DeploymentError", "ec_role 'ec_both': give ec_producer or ec_consumer"):
        engines.part("WORKER", "ec_both")
    with refused("DeploymentError", "contains unknown field `pool_mb`; its keys are folder, "):
        engines.producer(pool_mb=3)
    with refused("DeploymentError", r"tcp://0.0.0.0:7000: refused: .* set security.keys"):
        engines.producer(listen="tcp://0.0.0.0:7000")
    engines.folder.chmod(0o755) if engines.folder.exists() else engines.folder.mkdir(0o755)
    with refused("DeploymentError", "is open to others .mode 0755.; chmod 700 it"):
        engines.producer()

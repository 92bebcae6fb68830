"""What is wrong with a deployment that no single value of it is wrong about."""

from __future__ import annotations

from collections.abc import Iterator
from unicodedata import category
from urllib.parse import urlsplit

from tensorferry.codecs.machine.transport import GPU_TRANSPORTS
from tensorferry.pipeline.channels.addresses import is_loopback, is_wildcard, listening_host, reachable_host
from tensorferry.pipeline.deployment.document import Keys
from tensorferry.pipeline.deployment.spec import Deployment


def contradictions(d: Deployment, processes: int) -> Iterator[tuple[str, list[Keys]]]:
    """Problems, each with the keys that may be to blame, the likeliest first. processes: of all stages together."""
    if problem := _bad_name(d.name):
        yield problem, [("name",)]
    if d.scheduler.tp_size % d.scheduler.attention_tp_size:
        yield (
            f"{d.scheduler.attention_tp_size} does not divide scheduler.tp_size, {d.scheduler.tp_size}; "
            "make it a divisor",
            [("scheduler", "attention_tp_size"), ("scheduler", "tp_size")],
        )
    for pool, budget_mb, sharers, ranks in (
        ("pool", d.pool.budget_mb, ("tokenizer", "workers"), d.tokenizer.workers),
        ("embeddings_pool", d.embeddings_pool.budget_mb, ("encoder", "ranks"), d.encoder.ranks),
    ):
        least_mb = 2 if d.transport == "cuda_vmm" else 1  # GPU memory comes in chunks of 2 MiB
        if d.transport != "cpu" and budget_mb < ranks * least_mb:
            yield (
                f"{budget_mb} MiB over {ranks} {'.'.join(sharers)} leaves less than {least_mb} MiB for each; raise "
                f"the budget to {ranks * least_mb} or more, or start fewer",
                [(pool, "budget_mb"), sharers, ("transport",)],
            )
    if d.limits.item_mb > d.limits.request_mb:
        yield (
            f"{d.limits.item_mb} MiB is more than a whole request may have, limits.request_mb: "
            f"{d.limits.request_mb}; lower the one or raise the other",
            [("limits", "item_mb"), ("limits", "request_mb")],
        )
    if d.timeouts.quarantine_s <= d.timeouts.heartbeat_s:
        yield (
            f"{d.timeouts.quarantine_s} s is no longer than timeouts.heartbeat_s, {d.timeouts.heartbeat_s} s, so every "
            "peer would be quarantined; make it several heartbeats",
            [("timeouts", "quarantine_s"), ("timeouts", "heartbeat_s")],
        )
    if d.nodes > 1 and d.transport in ("shm", "cuda_ipc"):
        yield (
            f"{d.transport} works within one node, and nodes is {d.nodes}; use cuda_vmm, cpu or auto, or nodes: 1",
            [("transport",), ("nodes",)],
        )
    if d.transport == "cuda_vmm" and d.pp_size != 1:
        yield (
            f"cuda_vmm needs pp_size 1, not {d.pp_size}; use cuda_ipc, shm, cpu or auto",
            [("transport",), ("pp_size",)],
        )
    if d.transport != "cuda_vmm" and d.pool.acknowledge == "messages":
        yield (
            f"messages, beside transport: {d.transport}; only cuda_vmm can do without shared pages: set transport: "
            "cuda_vmm, or leave pool.acknowledge away",
            [("pool", "acknowledge"), ("transport",)],
        )
    if d.transport in GPU_TRANSPORTS and not d.gpus:
        yield (
            f"false, beside transport: {d.transport}; use shm, cpu or auto, or leave gpus away",
            [("gpus",), ("transport",)],
        )
    yield from _of_network(d, processes)
    if d.telemetry.otlp_endpoint is not None and (problem := _bad_endpoint(d.telemetry.otlp_endpoint)):
        yield problem, [("telemetry", "otlp_endpoint")]
    port = d.telemetry.prometheus_port
    if port is not None and port + processes - 1 > 65535:
        yield (
            f"{port} and one port more for each of {processes} processes goes beyond 65535; use {65536 - processes} "
            "or less",
            [("telemetry", "prometheus_port")],
        )


def _of_network(d: Deployment, processes: int) -> Iterator[tuple[str, list[Keys]]]:
    network, keys = d.network, d.security.keys
    bind_key: Keys = ("network", "bind")
    if network.bind is None:
        for problem, key in (
            (keys is not None, ("security", "keys")),
            (network.advertise is not None, ("network", "advertise")),
            (network.inboxes != "ipc", ("network", "inboxes")),
        ):
            if problem:
                said = keys if key[0] == "security" else getattr(network, key[1])
                yield (
                    f"{said} is for sockets on a network, and there are none without network.bind; set that too",
                    [key],
                )
        return
    try:
        host = listening_host(network.bind)
    except ValueError as problem:
        yield str(problem), [bind_key]
        return
    try:
        reachable_host(network.advertise if network.advertise is not None else network.bind)
    except ValueError as problem:
        if network.advertise is not None or not is_wildcard(host):
            yield str(problem), [("network", "advertise"), bind_key]
        else:
            yield (
                f"{network.bind} is every interface, and clients need one address; set network.advertise to a name or "
                "address that they reach",
                [bind_key],
            )
    if keys is None and not is_loopback(host):
        yield (
            f"{network.bind} can be reached from other machines, and nothing says who may connect; run `tensorferry "
            "keys new DIR` and set security.keys: DIR, or bind to 127.0.0.1",
            [bind_key],
        )
    ports = d.tokenizer.workers + (processes if network.inboxes == "tcp" else 0)
    last = network.port + ports - 1
    if last > 65535:
        yield (
            f"{network.port} and the {ports} sockets from there on go beyond 65535; use {65536 - ports} or less",
            [("network", "port")],
        )
    metrics = d.telemetry.prometheus_port
    if metrics is not None and network.port <= metrics + processes - 1 and metrics <= last:
        yield (
            f"{network.port} to {last} meet the ports of metrics, which start at telemetry.prometheus_port, {metrics}; "
            "move one of them",
            [("network", "port"), ("telemetry", "prometheus_port")],
        )


def _bad_endpoint(endpoint: str) -> str | None:
    """Why spans cannot be sent to this URL."""
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        sound = False
    if not sound or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        return f"{endpoint!a} is no URL of a receiver; write one like http://127.0.0.1:4318"
    if parts.username is not None or parts.query or parts.fragment:
        return f"{endpoint!a} has more than a host, a port and a path; leave the rest away"
    return None


def _bad_name(name: str) -> str | None:
    """Why this cannot name a deployment, whose name shows up in logs and, hashed, in file names."""
    bad = next((one for one in name if one == "/" or category(one) in ("Cc", "Zl", "Zp")), None)
    if bad is not None:
        return f"{name!a} has the character {bad!a}; leave it out"
    return f"{name!a} is blank; give the deployment a name" if not name.strip() else None

"""The step from a deployment file to a deployment that can run. Its starter decides the transport once, and logs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from tensorferry.cli.config import load_deployment, placing
from tensorferry.codecs.machine.facts import Facts
from tensorferry.codecs.machine.probe import gather
from tensorferry.codecs.machine.transport import GPU_TRANSPORTS, Budget, Decision, Wanted, decide, startup_fields
from tensorferry.pipeline.deployment.load import require_available
from tensorferry.pipeline.deployment.sglang_settings import Deprecation
from tensorferry.pipeline.deployment.spec import (
    MIB,
    Deployment,
    device_of,
    encoder_pool_nbytes,
    names_gpus,
    ranks_of,
    tokenizer_pool_nbytes,
)
from tensorferry.pipeline.telemetry import logs
from tensorferry.stages.adapters.registry import supports_cuda_vmm_feature_transport, takes_media

log = structlog.get_logger()


def load_to_run(
    file: Path, settings: Sequence[str], environ: Mapping[str, str] = os.environ, **bound: object
) -> tuple[Deployment, tuple[str, ...]]:
    """Load the deployment of FILE, and decide its transport: one of cpu, shm, cuda_ipc and cuda_vmm.

    Returns it with settings that make the same deployment of FILE in every stage. Sets up this process's log, with
    `bound` on every line, and logs deprecated settings, the transport, and every transport refused. Raises
    ConfigError.
    """
    deprecations: list[Deprecation] = []
    deployment = load_deployment(file, settings, environ=environ, tell=deprecations.append, plugins=True)
    logs.configure(deployment.telemetry, **bound)
    for deprecation in deprecations:
        log.warning("setting_deprecated", old=deprecation.old, new=deprecation.new, outcome=deprecation.outcome)
    with placing(file, settings):
        require_available(deployment)
        decided = settle(deployment, environ)
    changed: dict[str, str] = {}
    if decided.transport != deployment.transport:
        changed["transport"] = decided.transport
    if decided.gpus != deployment.gpus:
        changed["gpus"] = "false"
    kept = [setting for setting in settings if setting.partition("=")[0].strip() not in changed]
    return decided, (*kept, *(f"{key}={value}" for key, value in changed.items()))


def settle(deployment: Deployment, environ: Mapping[str, str] = os.environ) -> Deployment:
    """Decide the deployment's transport by what this machine can do, and log the decision.

    Looks for CUDA, which takes half a second in a process of its own, only if the decision may need it. Raises
    ConfigError if the deployment explicitly asks for a transport that cannot work.
    """
    wanted = wanted_by(deployment)
    may_need_cuda = wanted.transport in ("auto", *GPU_TRANSPORTS) or (wanted.transport == "shm" and wanted.gpus_named)
    facts = gather(environ, cuda=bool(may_need_cuda))
    decision = decide(wanted, facts)
    gpus = deployment.gpus and not decision.gpus_unused
    decided = msgspec.structs.replace(deployment, transport=decision.transport, gpus=gpus)
    _tell(decision, facts, decided, list(names_gpus(deployment)))
    return decided


def wanted_by(deployment: Deployment) -> Wanted:
    """Return what the transport policy needs to know of a deployment.

    The model is asked only what may matter, since a plug-in is imported for it.
    """
    adapter = deployment.model.adapter
    vmm = deployment.transport == "cuda_vmm" or (deployment.transport == "auto" and deployment.nodes > 1)
    return Wanted(
        transport=deployment.transport,
        nodes=deployment.nodes,
        pp_size=deployment.pp_size,
        multimodal=takes_media(adapter),
        opted_in=vmm and supports_cuda_vmm_feature_transport(adapter),
        disaggregated=deployment.disaggregation != "none",
        gpus=deployment.gpus,
        gpus_named=tuple(names_gpus(deployment).items()),
    )


def _tell(decision: Decision, facts: Facts, deployment: Deployment, naming: list[str]) -> None:
    """Log a line for every transport refused, as a warning only if there is a GPU, and a line for the outcome.

    deployment: as it was decided. naming: the keys that name GPUs, even if none is used.
    """
    tell = log.warning if facts.has_gpu else log.info
    for refusal in decision.refusals:
        tell("transport_refused", transport=refusal.rung, reason=refusal.reason, remedy=refusal.remedy)
    fields = startup_fields(
        decision,
        facts,
        features=_budget(deployment, "tokenizer", deployment.pool.budget_mb, tokenizer_pool_nbytes(deployment)),
        embeddings=_budget(
            deployment, "encoder", deployment.embeddings_pool.budget_mb, encoder_pool_nbytes(deployment)
        ),
        handle_cache=deployment.pool.handle_cache,
    )
    log.info("transport_chosen", **fields)
    if decision.gpus_unused:
        log.warning("gpus_unused", settings=naming, reason=decision.gpus_unused)


def _budget(deployment: Deployment, stage: str, total_mb: int, each_nbytes: int) -> Budget:
    """Return the budget of the pools of a stage's processes."""
    ranks = ranks_of(deployment)[stage]
    gpus = (device_of(deployment, stage, rank) for rank in range(ranks))
    return Budget(total_mb, each_nbytes // MIB, ranks, tuple(gpu for gpu in gpus if gpu is not None))

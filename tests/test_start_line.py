"""P4: what the log says of the transport at start is what the deployment file says."""

from __future__ import annotations

import pytest
import structlog

from tensorferry.cli import transport as cli_transport
from tensorferry.codecs.facts import CudaFacts, Facts, Gpu, HostFacts, Trial
from tensorferry.pipeline.config import Deployment, PoolSpec, TokenizerSpec

WORKS = Trial(True)
FACTS = Facts(
    HostFacts("6.18.0", WORKS, 1 << 30, 1 << 34, None, 1 << 16, 0, False, False, False),
    CudaFacts(driver=13000, gpus=(Gpu("NVIDIA H200", "GPU-0001"),), words=WORKS, ipc=WORKS),
)


@pytest.mark.parametrize(("budget_mb", "workers", "cached"), [(96, 3, False), (2048, 2, True)])
def test_p4_the_start_line_has_the_numbers_of_the_deployment_file(
    monkeypatch: pytest.MonkeyPatch, budget_mb: int, workers: int, cached: bool
) -> None:
    monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: FACTS)
    pool, tokenizer = PoolSpec(budget_mb=budget_mb, handle_cache=cached), TokenizerSpec(workers=workers)
    deployment = Deployment(name="a", transport="auto", pool=pool, tokenizer=tokenizer)
    with structlog.testing.capture_logs() as lines:
        assert cli_transport.settle(deployment, {}).transport == "cuda_ipc"
    [line] = [line for line in lines if line["event"] == "transport_chosen"]
    assert (line["hbm_budget_mib"], line["tokenizer_workers"]) == (budget_mb, workers)
    assert (line["mib_per_worker"], line["handle_cache"]) == (budget_mb // workers, cached)

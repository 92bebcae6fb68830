"""Every trace of the sample collection, read whole. The counts were taken from the files themselves, with `csv` and
`json` alone: rows, requests, tokens in and out, images."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tensorferry.codecs.errors import TraceError
from tensorferry.replay.trace.loaded_trace import Trace, load, read_trace
from tensorferry.replay.trace.trace_file import Recording

pytestmark = pytest.mark.samples

#: file: (format, rows, requests, tokens in, tokens out, images)
COUNTED = {
    "odd/02_cr_only.csv": ("azure-llm", 10, 10, 1045, 145, 0),
    "odd/zone.csv": ("azure-llm", 3, 2, 4, 2, 0),  # a row at +99:99 is dropped
    "azure/AzureLLMInferenceTrace_code.csv": ("azure-llm", 8819, 8819, 18_059_974, 245_896, 0),
    "azure/AzureLLMInferenceTrace_conv.csv": ("azure-llm", 19_366, 19_366, 22_361_870, 4_088_665, 0),
    "azure/AzureLLMInferenceTrace_code_1week.notebook-rows.csv": ("azure-llm", 10, 10, 24_016, 180, 0),
    "azure/AzureLLMInferenceTrace_conv_1week.notebook-rows.csv": ("azure-llm", 10, 10, 12_767, 856, 0),
    "azure/AzureLMMInferenceTrace_multimodal.notebook-rows.csv": ("azure-lmm", 10, 10, 12_859, 1395, 22),
    "burstgpt/BurstGPT_1.quoted-rows.csv": ("burstgpt", 3, 3, 1976, 524, 0),
    "burstgpt/BurstGPT_3.quoted-rows.csv": ("burstgpt", 4, 4, 3656, 776, 0),
    "derived/azure_2023_code.head300.shuffled.csv": ("azure-llm", 300, 300, 627_529, 7126, 0),
    "derived/azure_lmm.bom_crlf.csv": ("azure-lmm", 10, 10, 12_859, 1395, 22),
    "derived/azure_lmm.csv.gz": ("azure-lmm", 10, 10, 12_859, 1395, 22),
    "derived/azure_lmm.quoted_reordered.csv": ("azure-lmm", 10, 10, 12_859, 1395, 22),
    "derived/azure_lmm.semicolon.csv": ("azure-lmm", 10, 10, 12_859, 1395, 22),
    "inference-perf/trace.csv": ("azure-llm", 20, 20, 11_540, 1674, 0),
    "mooncake/conversation_trace.head4000.jsonl": ("mooncake", 4000, 4000, 53_249_359, 1_388_321, 0),
    "mooncake/mooncake_trace.arxiv.head1000.jsonl": ("mooncake", 1000, 1000, 9_792_030, 199_084, 0),
    "mooncake/synthetic_trace.jsonl": ("mooncake", 3993, 3993, 61_194_628, 595_432, 0),
    "aiperf/precise_schedule.jsonl": ("mooncake", 8, 8, 2800, 2056, 0),
    "aiperf/production_trace.jsonl": ("mooncake", 10, 10, 7680, 1856, 0),
    "qwen-bailian/quoted-rows.jsonl": ("qwen-bailian", 1, 1, 502, 1494, 0),
    "servegen/generated_mm-image_600s_4rps_seed321.jsonl": ("servegen", 2401, 2401, 2_058_032, 364_036, 4731),
    "dynamo/pi_request_trace.jsonl.gz": ("dynamo", 61, 17, 66_520, 8094, 0),
    "handwritten/aiperf_mooncake_modes.jsonl": ("mooncake", 7, 6, 1617, 129, 0),  # one image lies on a server
    "handwritten/aiperf_multi_turn_images.jsonl": ("aiperf-multi-turn", 3, 3, 0, 3 * 128, 3),
    "handwritten/aiperf_random_pool_images.jsonl": ("aiperf-single-turn", 2, 2, 0, 2 * 128, 2),
    "handwritten/aiperf_single_turn_images.jsonl": ("aiperf-single-turn", 6, 5, 0, 272, 5),  # as above
    "handwritten/openai_batch_images.jsonl": ("openai-batch", 2, 2, 0, 110, 1),
    "handwritten/sagemaker_data_capture.jsonl": ("sagemaker", 1, 1, 0, 8, 0),
    "handwritten/vllm_custom_image.jsonl": ("vllm-custom-image", 2, 2, 0, 2 * 128, 4),
}
REFUSED = {
    "derived/azure_lmm.no_header.csv": "no header",
    "derived/azure_lmm.truncated.csv.gz": "ends early",
    "handwritten/aiperf_inputs.json": "inputs.json",
    "inference-perf/otel_simple_chain.json": "OpenTelemetry",
    "image-sizes/coco_test-dev2017_sizes.csv": "not a trace",
}
#: Requests a day of each of ServeGen's clients: its rates, times the length of its windows.
CLIENTS = {
    0: 43_802, 2: 4326, 5: 105_946, 6: 12_234, 7: 85_554, 10: 55_218, 11: 100_925, 18: 273, 20: 4232, 22: 1994, 25: 2856
}  # fmt: skip


@pytest.fixture(scope="module")
def traces() -> Path:
    root = os.environ.get("TENSORFERRY_SAMPLES")
    if not root:
        pytest.skip("TENSORFERRY_SAMPLES does not name the sample collection")
    return Path(root) / "traces"


def counts(trace: Trace) -> tuple[str, int, int, int, int, int]:
    requests = trace.requests
    tokens = sum(request.text_tokens or request.context_tokens or 0 for request in requests)
    images = sum(len(request.images) for request in requests)
    return trace.format, trace.read, len(requests), tokens, sum(r.output_tokens for r in requests), images


@pytest.mark.parametrize("file", COUNTED)
def test_a_sample_holds_what_was_counted_in_it(traces: Path, file: str) -> None:
    recording = Recording(traces / file)
    trace = load(recording)
    assert counts(trace) == COUNTED[file]
    assert trace.read == len(trace.requests) + len(trace.drops)
    assert list(recording.in_order(recording.survey())) == trace.requests


@pytest.mark.parametrize("file", REFUSED)
def test_what_is_no_trace_is_refused_with_a_reason(traces: Path, file: str) -> None:
    with pytest.raises(TraceError, match=REFUSED[file]):
        read_trace(traces / file)


def test_no_sample_is_forgotten(traces: Path) -> None:
    files = {str(path.relative_to(traces)) for path in traces.rglob("*") if path.is_file()}
    known = {*COUNTED, *REFUSED, "README.md", "SHA256SUMS"}
    left = {file for file in files - known if not file.startswith(("LICENSES/", "servegen/chunk-"))}
    assert not left


@pytest.mark.parametrize("client", [2, 18, 20])
def test_a_client_of_servegen_makes_as_many_requests_as_its_rates_say(traces: Path, client: int) -> None:
    tally = Recording(traces / "servegen" / f"chunk-{client}-trace.csv").survey()
    assert (tally.read, tally.inversions) == (CLIENTS[client], 0)


def test_clients_of_servegen_are_drawn_together_in_the_order_of_time(traces: Path, tmp_path: Path) -> None:
    for client in (2, 6, 18, 25):
        for part in ("trace.csv", "dataset.json"):
            (tmp_path / f"chunk-{client}-{part}").symlink_to(traces / "servegen" / f"chunk-{client}-{part}")
    tally = Recording(tmp_path).survey()
    assert (tally.read, tally.inversions) == (sum(CLIENTS[client] for client in (2, 6, 18, 25)), 0)
    assert tally.last_ns < 86_400_000_000_000


def test_azure_2023_has_a_silent_gap_of_217_seconds(traces: Path) -> None:
    times = [request.at_ns for request in read_trace(traces / "azure" / "AzureLLMInferenceTrace_code.csv").requests]
    assert max(b - a for a, b in pairwise(times)) // 1_000_000_000 == 217
    assert (times[-1] - times[0]) // 1_000_000_000 in (3435, 3436)


def test_mooncake_has_up_to_19_requests_at_one_instant(traces: Path) -> None:
    """In its first 4,000 rows; the whole has 28."""
    trace = read_trace(traces / "mooncake" / "conversation_trace.head4000.jsonl")
    assert max(Counter(request.at_ns for request in trace.requests).values()) == 19
    assert "fewer_block_ids_than_tokens" not in trace.notes

"""A process with one vLLM engine, which a test talks to in lines of JSON: a request in, its outcome out.

Started as `engine.py CHECKPOINT ARGUMENTS`, ARGUMENTS the JSON of what `vllm.LLM` is given. A line is a list of
requests that run together: `{"prompt", "images": [path], "items": [{"name", "grid"}], "max_tokens"}`. With images and
items, the items are the images' names; with items alone, they are what another engine made. Prints `READY` once it
serves.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    "limit_mm_per_prompt": {"image": 4, "video": 0},
    "seed": 0,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from PIL import Image

    prompt: dict[str, Any] = {"prompt": request["prompt"]}
    items = request.get("items", [])
    if request.get("images"):
        prompt["multi_modal_data"] = {"image": [Image.open(path).convert("RGB") for path in request["images"]]}
    elif items:
        prompt["multi_modal_data"] = {"image": {"image_grid_thw": torch.tensor([item["grid"] for item in items])}}
    if items:
        prompt["multi_modal_uuids"] = {"image": [item["name"] for item in items]}
    return prompt


def main(checkpoint: str, arguments: str) -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(arguments)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints is no answer
    engine = LLM(model=checkpoint, **(SMALL | given))
    print("READY", file=answers)
    for line in sys.stdin:
        requests = json.loads(line)
        sampling = [SamplingParams(temperature=0.0, max_tokens=request["max_tokens"]) for request in requests]
        outcomes = []
        for outcome in engine.generate([prompt_of(request) for request in requests], sampling, use_tqdm=False):
            made = outcome.outputs[0]
            outcomes.append({"tokens": list(made.token_ids), "finish": made.finish_reason})
        print(json.dumps(outcomes), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A deployment whose vocabulary has more special tokens than text accepts the prompts that a replay invents."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from tensorferry.stages.tokenizer.text import PLACEHOLDERS

DEPLOYMENT = """
name: vocabulary-test
transport: cpu
runtime_dir: {runtime}/run
model: {{adapter: fingerprint}}
tokenizer: {{vocabulary: {vocabulary}}}
telemetry: {{log_level: error}}
"""


def like_qwens(path: Path) -> None:
    """Write few tokens of text beside Qwen2-VL's special ones, so that random ids are often special."""
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate("abcdefgh")}, merges=[]))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *PLACEHOLDERS, "<|vision_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(path))


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_no_invented_prompt_is_refused_for_a_special_token(tmp_path: Path) -> None:
    vocabulary, trace, file, out = (tmp_path / name for name in ("tokenizer.json", "t.csv", "d.yaml", "out"))
    like_qwens(vocabulary)
    rows = (f"2024-10-15T12:00:00.{number:03}Z,0,{20 + number},2\n" for number in range(40))
    trace.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + "".join(rows))
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file.write_text(DEPLOYMENT.format(runtime=runtime, vocabulary=vocabulary))
        replay = ["replay", str(trace), "--config", str(file), "--speed", "1", "--out", str(out)]
        program = [sys.executable, "-P", "-m", "tensorferry", *replay]
        subprocess.run(program, check=False, capture_output=True, timeout=100)
    summary = json.loads((out / "summary.json").read_bytes())
    assert (summary["failed"], summary["requests"]["ok"]) == ([], 40)

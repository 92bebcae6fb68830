"""Text to token ids, and prompts put together with their placeholders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tensorferry.codecs.errors import BadRequest, ConfigError
from tensorferry.stages.tokenizer import text as text_module
from tensorferry.stages.tokenizer.text import BUNDLED, PLACEHOLDERS, Rows, TextEncoder

START, PAD, END = 256, 257, 258


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder.from_file(None)


def byte_level() -> Tokenizer:
    """The bundled vocabulary, made anew: GPT-2's names for bytes, each a token, no merges, placeholders last."""
    plain = [byte for byte in range(256) if 33 <= byte < 127 or 161 <= byte < 173 or byte >= 174]
    others = [byte for byte in range(256) if byte not in plain]
    names = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=dict(sorted(names.items(), key=lambda pair: pair[1])), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in PLACEHOLDERS])
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_bundled_vocabulary_is_what_the_library_makes():
    bundled = Path(text_module.__file__).with_name(BUNDLED).read_text(encoding="utf-8")
    assert json.loads(bundled) == json.loads(byte_level().to_str())
    assert len(bundled) < 4096


@given(text=st.text())
def test_bundled_vocabulary_is_bytes(encoder: TextEncoder, text: str):
    ids = encoder.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())


def test_ids_of_the_placeholders(encoder: TextEncoder):
    assert (encoder.vision_start, encoder.image_pad, encoder.vision_end, encoder.size) == (START, PAD, END, 259)


# --- what reads like a placeholder (B40) --------------------------------------------------------------------


@pytest.mark.parametrize("token", PLACEHOLDERS)
def test_placeholder_in_text_is_text(encoder: TextEncoder, token: str):
    text = f"what does {token}{token} mean, {token}?"
    assert encoder.encode(text).tolist() == list(text.encode())


def test_placeholder_that_is_an_ordinary_added_token_is_text_too(tmp_path: Path):
    tokenizer = byte_level()
    described = json.loads(tokenizer.to_str())
    for added in described["added_tokens"]:
        added["special"] = False
        added["normalized"] = True
    tokenizer = Tokenizer.from_str(json.dumps(described))
    assert tokenizer.encode("<|image_pad|>").ids == [PAD]
    encoder = TextEncoder.from_file(saved(tokenizer, tmp_path))
    assert encoder.image_pad == PAD
    assert encoder.encode("<|image_pad|>").tolist() == list(b"<|image_pad|>")


def test_placeholder_that_the_model_itself_spells_is_refused(tmp_path: Path):
    words = {"hello": 0, "[UNK]": 1, **{token: 2 + n for n, token in enumerate(PLACEHOLDERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = TextEncoder.from_file(saved(tokenizer, tmp_path))
    assert encoder.encode("hello you").tolist() == [0, 1]
    with pytest.raises(BadRequest, match="text contains a placeholder"):
        encoder.encode("hello <|image_pad|>")


def test_vocabulary_that_cuts_or_pads_does_neither(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=0)
    encoder = TextEncoder.from_file(saved(tokenizer, tmp_path))
    assert encoder.encode("a longer text").tolist() == list(b"a longer text")


def test_text_that_is_no_unicode_is_refused(encoder: TextEncoder):
    with pytest.raises(BadRequest, match="text cannot be encoded"):
        encoder.encode("lone \ud800 surrogate")


# --- vocabularies that will not do --------------------------------------------------------------------------


def test_no_special_id_of_a_vocabulary_like_qwens_stands_for_text(tmp_path: Path):
    tokenizer = byte_level()
    names = ["<|video_pad|>", "<|audio_bos|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    encoder = TextEncoder.from_file(saved(tokenizer, tmp_path))
    assert encoder.special_ids().tolist() == list(range(256, 264))
    plain = np.setdiff1d(np.arange(encoder.size, dtype=np.int32), encoder.special_ids())
    encoder.check_ids(plain)


def test_what_a_model_names_like_a_control_token_and_gaps_stand_for_no_text(tmp_path: Path):
    names = [("a", 0), ("</s>", 1), ("<0x0A>", 2), ("<|eot|>", 3), ("b", 9)]
    tokenizer = Tokenizer(models.BPE(vocab=dict(names), merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in PLACEHOLDERS])
    special = TextEncoder.from_file(saved(tokenizer, tmp_path)).special_ids()
    assert set(special.tolist()).isdisjoint({0, 2, 9})
    assert {1, 3, 4, 8} <= set(special.tolist())


def test_vocabulary_without_placeholders_is_refused_by_name(tmp_path: Path):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens(["<|vision_end|>"])
    path = saved(tokenizer, tmp_path)
    with pytest.raises(ConfigError) as caught:
        TextEncoder.from_file(path)
    assert "tokenizer.vocabulary" in str(caught.value)
    assert f"{path} lacks <|image_pad|>, <|vision_start|>:" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"", "not a tokenizer.json"), (b"{}", "not a tokenizer.json"), (b"\xff\0", "not a tok")],
)
def test_file_that_is_no_vocabulary_is_refused_by_name(tmp_path: Path, content: bytes | None, problem: str):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        TextEncoder.from_file(str(path))
    assert str(path) in str(caught.value)


# --- token ids of a client ----------------------------------------------------------------------------------


def int32(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def test_token_ids_are_read(encoder: TextEncoder):
    assert encoder.read_ids(int32(0, 255, 7)).tolist() == [0, 255, 7]
    assert encoder.read_ids(memoryview(b"x" + int32(5))[1:]).tolist() == [5]
    assert encoder.read_ids(b"").tolist() == []
    assert encoder.read_ids(b"").dtype == np.int32


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (int32(1, -1), "token 1 has id -1; the vocabulary ends at 258"),
        (int32(259), "token 0 has id 259"),
        (int32(1, 2, 2**31 - 1), "token 2 has id 2147483647"),
        (int32(1, PAD), r"token 1 is <\|image_pad\|>, id 257; placeholders come from items only"),
        (int32(START), r"token 0 is <\|vision_start\|>"),
        (int32(END), r"token 0 is <\|vision_end\|>"),
        (int32(1)[:3], "token ids of 3 bytes"),
    ],
)
def test_bad_token_ids_are_named(encoder: TextEncoder, data: bytes, problem: str):
    with pytest.raises(BadRequest, match=problem):
        encoder.read_ids(data)


# --- prompts ------------------------------------------------------------------------------------------------


def test_prompt_of_text_and_items(encoder: TextEncoder):
    ids, spans = encoder.assemble([encoder.encode("ab"), Rows(3), Rows(1, "video"), encoder.encode("c"), Rows(2)])
    assert ids.dtype == np.int32
    assert ids.tolist() == [97, 98, START, PAD, PAD, PAD, END, START, PAD, END, 99, START, PAD, PAD, END]
    assert spans == [(3, 3), (8, 1), (12, 2)]


def test_prompt_of_nothing(encoder: TextEncoder):
    ids, spans = encoder.assemble([])
    assert (ids.tolist(), ids.dtype, spans) == ([], np.int32, [])


@given(parts=st.lists(st.one_of(st.text(max_size=9), st.integers(1, 9))))
def test_spans_are_the_only_placeholders(encoder: TextEncoder, parts: list[str | int]):
    ids, spans = encoder.assemble([Rows(part) if isinstance(part, int) else encoder.encode(part) for part in parts])
    assert [length for _, length in spans] == [part for part in parts if isinstance(part, int)]
    mask = np.zeros(len(ids), bool)
    for offset, length in spans:
        mask[offset : offset + length] = True
        assert ids[offset - 1] == START
        assert ids[offset + length] == END
    assert np.array_equal(ids == PAD, mask)
    assert bytes(ids[ids < 256].tolist()) == "".join(part for part in parts if isinstance(part, str)).encode()

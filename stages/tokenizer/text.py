"""Text to token ids, and the splice of text, token ids and items' placeholders into one prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from tensorferry.codecs.errors import BadRequest
from tensorferry.stages.plugin import bad_config

Ids = npt.NDArray[np.int32]

#: The tokens before, for and after an item's rows, as Qwen2-VL's vocabulary names them.
VISION_START, IMAGE_PAD, VISION_END = PLACEHOLDERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
#: The token for the rows of a video. Vocabularies without it use `IMAGE_PAD`.
VIDEO_PAD = "<|video_pad|>"
#: Names of control tokens that a model lists itself, as Qwen, Llama and BERT write them.
_CONTROL = re.compile(r"<\|.+\|>|</?s>|<(?:unk|pad|bos|eos|mask)>|\[(?:UNK|PAD|CLS|SEP|MASK)\]")
#: One token a byte of UTF-8, id = byte, then the placeholders. `tests/stages/tokenizer/test_text.py` makes it again
#: and compares.
BUNDLED = "bytelevel.json"


@dataclass(frozen=True, slots=True)
class Rows:
    """An item's place in a prompt."""

    count: int  #: > 0
    modality: str = "image"


class TextEncoder:
    """A vocabulary. Thread-safe; the tokenizers library encodes without Python's lock."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """name: of the file, for errors. Raises ConfigError if a placeholder is missing."""
        found = {token: tokenizer.token_to_id(token) for token in PLACEHOLDERS}
        ids = {token: number for token, number in found.items() if number is not None}
        video_pad = tokenizer.token_to_id(VIDEO_PAD)
        if missing := found.keys() - ids.keys():
            raise bad_config(
                "tokenizer.vocabulary",
                f"{name} lacks {', '.join(sorted(missing))}: it is not the vocabulary of a Qwen2-VL-like model",
            )
        # A vocabulary may list a placeholder as an ordinary added token. Those are found in text whatever
        # encode_special_tokens says, so they become special here; their ids stay. A user's text is not cut or padded.
        special = PLACEHOLDERS if video_pad is None else (*PLACEHOLDERS, VIDEO_PAD)
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vision_start, self.image_pad, self.vision_end = (ids[token] for token in PLACEHOLDERS)
        self.video_pad = self.image_pad if video_pad is None else video_pad
        self.size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  #: all ids are below

    @classmethod
    def from_file(cls, path: str | None) -> TextEncoder:
        """The vocabulary of a `tokenizer.json`; None: the bundled one of bytes.

        Raises ConfigError that names the file if it cannot be read or lacks a placeholder.
        """
        name = path or BUNDLED
        try:
            source = Path(path) if path else files(__package__) / BUNDLED
            tokenizer = Tokenizer.from_str(source.read_text(encoding="utf-8"))
        except OSError as problem:
            raise bad_config("tokenizer.vocabulary", f"{name}: {problem.strerror}") from None
        except Exception as problem:  # the library raises plain Exception
            raise bad_config("tokenizer.vocabulary", f"{name} is not a tokenizer.json: {problem}") from None
        return cls(tokenizer, name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The library's own, for decoding."""
        return self._tokenizer

    def decode(self, ids: bytes) -> str:
        """The text of an answer's token ids, int32, little endian. Special tokens, and ids that the vocabulary does
        not have, add nothing; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(np.frombuffer(ids, "<u4").tolist(), skip_special_tokens=True)
        return text

    def special_ids(self) -> Ids:
        """The ids below `size` that stand for no text, ascending. These are the ids of all added or special tokens
        (placeholders too), of tokens with the name of a control token, such as `</s>`, and of no token."""
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        plain = {number for name, number in names.items() if not _CONTROL.fullmatch(name)}
        plain -= self._tokenizer.get_added_tokens_decoder().keys()
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(sorted(plain), np.int32))

    def encode(self, text: str) -> Ids:
        """The ids of a text, no start or end tokens added.

        Special tokens are not looked for: the characters of a placeholder in the text are encoded as characters.
        Templates come as token ids, not as text. Raises BadRequest if the text cannot be encoded.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as problem:  # a lone surrogate is a TypeError, a model without unknown token an Exception
            raise BadRequest(f"text cannot be encoded: {problem}") from None
        ids = np.array(encoding.ids, np.int32)
        if self._placeholders_in(ids).any():  # the vocabulary's model spells one by itself
            raise BadRequest("text contains a placeholder token")
        return ids

    def read_ids(self, data: bytes | memoryview) -> Ids:
        """A client's token ids, little-endian int32, checked by `check_ids`; a view of `data`."""
        if len(data) % 4:
            raise BadRequest(f"token ids of {len(data)} bytes; they are 4 bytes each")
        ids = np.frombuffer(data, "<i4") if len(data) else np.empty(0, np.int32)
        self.check_ids(ids)
        return ids

    def check_ids(self, ids: Ids) -> None:
        """Raise BadRequest that names the first id outside the vocabulary, or the first placeholder.

        Only `assemble` puts placeholders in, so they match the items.
        """
        outside = (ids < 0) | (ids >= self.size)
        if outside.any():
            at = int(outside.argmax())
            raise BadRequest(f"token {at} has id {ids[at]}; the vocabulary ends at {self.size - 1}")
        found = self._placeholders_in(ids)
        if found.any():
            at = int(found.argmax())
            token = self._tokenizer.id_to_token(int(ids[at]))
            raise BadRequest(f"token {at} is {token}, id {ids[at]}; placeholders come from items only")

    def assemble(self, parts: Sequence[Ids | Rows]) -> tuple[Ids, list[tuple[int, int]]]:
        """Join the parts of a request, in order, to one prompt. A part is token ids, or the rows of an item.

        An item becomes vision_start, one image_pad or video_pad a row, and vision_end. Returns the ids and, for each
        item in order, (offset, length) of its pads.
        """
        total = sum(part.count + 2 if isinstance(part, Rows) else len(part) for part in parts)
        ids = np.empty(total, np.int32)
        spans: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            if isinstance(part, Rows):
                assert part.count > 0, "an item of no rows"
                last = end + 1 + part.count
                spans.append((end + 1, part.count))
                ids[end] = self.vision_start
                ids[end + 1 : last] = self.video_pad if part.modality == "video" else self.image_pad
                ids[last] = self.vision_end
                end = last + 1
            else:
                ids[end : end + len(part)] = part
                end += len(part)
        return ids, spans

    def _placeholders_in(self, ids: Ids) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = ids == self.vision_start  # numpy's isin takes 20 us of a short text's 40
        for placeholder in (self.image_pad, self.video_pad, self.vision_end):
            found |= ids == placeholder
        return found

"""An answer's token ids to text, as they come: whole characters, and nothing of special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  #: what bytes that are no UTF-8 become


class Detokenizer:
    """One answer. The texts that it gives, one after the other, are what decoding all ids at once begins with.

    Bytes at the end that are no whole character are left out: the result's text, made of all ids, has U+FFFD for them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)

    def add(self, ids: Iterable[int]) -> str:
        """What these ids add to the text. The bytes of a character that is not whole yet stay for the next ones."""
        new = list(ids)
        self._ids += new
        if self._stream is not None:
            try:
                text = "".join(filter(None, (self._stream.step(self._tokenizer, each) for each in new)))
            except Exception:  # the library's plain Exception: of bytes that were taken for a character, and are none
                self._stream = None
            else:
                self._given += text
                return text
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return self._rest(whole.rstrip(REPLACEMENT))

    def _rest(self, text: str) -> str:
        """What of `text` was not given yet; nothing where what was given is no beginning of it."""
        rest = text[len(self._given) :] if text.startswith(self._given) else ""
        self._given += rest
        return rest

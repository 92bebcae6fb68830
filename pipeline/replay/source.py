"""The lines of a trace file: gzip or plain, any BOM, told by its bytes and never by its name."""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeAlias

from tensorferry.codecs.errors import TraceError

#: Longer than any honest row (4 Mi tokens of text); a file without line ends must not be read into memory.
MAX_LINE_CHARACTERS = 64 << 20
_GZIP = b"\x1f\x8b"
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OTHERS = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first",
    b"\xfd7zXZ\x00": "compressed with xz; unpack it first",
    b"BZh": "compressed with bzip2; unpack it first",
    b"PAR1": "a Parquet file; write it as CSV or JSON lines first",
    b"ARROW1": "an Arrow file; write it as CSV or JSON lines first",
    b"version https://git-lfs": "a Git LFS pointer, not the trace itself; fetch it with `git lfs pull`",
}
_Peekable: TypeAlias = "io.BufferedReader[Any]"  # generic for type checkers alone


def read_lines(path: Path) -> Generator[tuple[int, str]]:
    """(line number, line without its end) for each line of the file, read as they are asked for; to be closed.

    Bytes that are not UTF-8 come as lone surrogates, so that they cost one row and not the file. Raises
    TraceError: no such file, not text, a compressed file that ends early.
    """
    number = 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(str(path), None, "not a regular file; a trace is read twice, so it cannot be a pipe")
        with path.open("rb") as file, _unpacked(file) as data, _decoded(path, data) as text:
            while line := text.readline(MAX_LINE_CHARACTERS):
                number += 1
                if len(line) == MAX_LINE_CHARACTERS:
                    raise TraceError(str(path), number, f"a line of more than {MAX_LINE_CHARACTERS} characters")
                yield number, line.rstrip("\r\n")
    except EOFError:
        raise TraceError(str(path), None, "the gzip data ends early, as after a broken download") from None
    except (zlib.error, gzip.BadGzipFile) as problem:
        raise TraceError(str(path), None, f"damaged gzip data: {problem}") from None
    except UnicodeDecodeError as problem:
        raise TraceError(str(path), number + 1, f"not {problem.encoding} text: {problem.reason}") from None
    except OSError as problem:
        raise TraceError(str(path), None, problem.strerror or str(problem)) from None


def _unpacked(file: _Peekable) -> _Peekable:
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if file.peek(2)[:2] == _GZIP else file


def _decoded(path: Path, file: _Peekable) -> io.TextIOWrapper:
    """The file as text, in the encoding its byte order mark names, else UTF-8."""
    head = file.peek(64)[:64]
    if head.startswith(_PICKLE):
        raise TraceError(
            str(path),
            None,
            "a Python pickle. Unpickling runs whatever code the file names, so replay never does it; "
            "docs/traces.md shows how to write such a dump as JSON lines where it was made",
        )
    if head.startswith(_GZIP):
        raise TraceError(str(path), None, "compressed twice; unpack it once")
    for magic, problem in _OTHERS.items():
        if head.startswith(magic):
            raise TraceError(str(path), None, problem)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return io.TextIOWrapper(file, "utf-16", newline="\n")
    return io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="\n")

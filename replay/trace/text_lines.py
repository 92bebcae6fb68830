"""The bytes of a trace as lines of UTF-8, from one file or a folder of parts, gzip or plain, with any byte order mark.
The content decides, never the name."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import stat
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from tensorferry.codecs.errors import TraceError

#: Longer than any valid row (4 Mi tokens of text). A file without line ends must not be read into memory.
MAX_LINE_NBYTES = 64 << 20
_CHUNK_NBYTES = 256 << 10
_TAR_MAGIC = slice(257, 262)  # of its first header, POSIX and GNU alike
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_WIDE = (b"\xff\xfe", b"\xfe\xff")
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OTHERS = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PK\x05\x06": "an empty zip archive; there is no trace in it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"Rar!\x1a\x07": "a RAR archive; unpack it first",
    b"!<arch>\n": "an ar archive; unpack it first",
    b"SQLite format 3\x00": "an SQLite database; write its table as CSV first (`sqlite3 -csv -header`)",
    b"\x04\x22\x4d\x18": "compressed with lz4; unpack it first",
    b"\x1f\x9d": "compressed with compress; unpack it first (`uncompress`)",
    b"LZIP": "compressed with lzip; unpack it first",
    b"\x5d\x00\x00": "compressed with lzma; unpack it first",
    b"\xff\x06\x00\x00sNaPpY": "compressed with snappy; unpack it first",
    b"Obj\x01": "an Avro file; write it as CSV or JSON lines first",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file; write it as CSV or JSON lines first",
    b"\x93NUMPY": "a NumPy array; write it as CSV or JSON lines first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first",
    b"\xfd7zXZ\x00": "compressed with xz; unpack it first",
    b"BZh": "compressed with bzip2; unpack it first",
    b"PAR1": "a Parquet file; write it as CSV or JSON lines first",
    b"ARROW1": "an Arrow file; write it as CSV or JSON lines first",
    b"version https://git-lfs": "a Git LFS pointer, not the trace itself; fetch it with `git lfs pull`",
}
_Peekable: TypeAlias = "io.BufferedReader[Any]"  # generic for type checkers alone


class Source:
    """The files of a trace. They are opened for each pass, and closed after it."""

    def __init__(self, path: Path) -> None:
        """path: a file, or a folder whose files, ordered by name, are the parts of one trace.

        Raises TraceError if there is no such file, or if it cannot be read twice.
        """
        self.path = path
        self.files = _files(path)
        #: The number of the first line of each file opened so far, counted over all files.
        self._starts = [1]

    @property
    def folder(self) -> Path:
        """The base of the relative paths in the trace."""
        return (self.path if self.path.is_dir() else self.path.parent).resolve()

    def sha256(self) -> str:
        """Hash the stored bytes of all files, one after the other."""
        digest = hashlib.sha256()
        for file in self.files:
            with _friendly(file), file.open("rb") as raw:
                while chunk := raw.read(_CHUNK_NBYTES):
                    digest.update(chunk)
        return digest.hexdigest()

    def lines(self) -> Generator[tuple[int, int, bytes]]:
        """Read (line number, offset, line with its end) one by one. The caller closes the generator.

        offset: for `Lines.at`. Raises TraceError if it is not text, or a compressed file that ends early.
        """
        number = 0
        with _friendly(self.path), ExitStack() as undo:
            stream, offset = self._open(undo)
            readline = stream.readline
            while line := readline(MAX_LINE_NBYTES):
                number += 1
                if len(line) == MAX_LINE_NBYTES:
                    raise TraceError(str(self.path), number, f"a line of more than {MAX_LINE_NBYTES} bytes")
                yield number, offset, line
                offset += len(line)

    @contextmanager
    def seekable(self) -> Iterator[Lines]:
        """Give the same lines by their offsets. A file that cannot be read from the middle, such as gzip, is unpacked
        into a temporary file for the block."""
        with _friendly(self.path), ExitStack() as undo:
            stream, _ = self._open(undo)
            if not isinstance(stream, io.BufferedReader) or not stream.seekable():
                unpacked = undo.enter_context(tempfile.TemporaryFile(prefix="tensorferry-trace-"))
                shutil.copyfileobj(stream, unpacked, _CHUNK_NBYTES)
                yield Lines(unpacked)
            else:
                yield Lines(stream)

    def place(self, number: int) -> str:
        """Name the file and line of line `number` of a folder; empty for a single file."""
        if len(self.files) == 1:
            return ""
        part = bisect_right(self._starts, number) - 1
        return f"{self.files[part].relative_to(self.path)}:{number - self._starts[part] + 1}: "

    def _open(self, undo: ExitStack) -> tuple[_Peekable, int]:
        """Open the lines as one stream. Returns it and the offset of the first line."""
        if len(self.files) == 1:
            raw = undo.enter_context(io.BufferedReader(self.files[0].open("rb", buffering=0), _CHUNK_NBYTES))
            head = raw.peek(4)
            if not head.startswith((_GZIP, *_WIDE)) and not _ends_lines_with_cr(head):
                _refuse_foreign(self.files[0], raw)
                return raw, len(raw.read(3)) if head.startswith(_BOM) else 0
        chunks = self._parts()
        undo.callback(chunks.close)
        return io.BufferedReader(_Chunks(chunks), _CHUNK_NBYTES), 0

    def _parts(self) -> Generator[bytes]:
        """Read all files as UTF-8, each with a line end at its end."""
        count = 1
        self._starts = []
        for file in self.files:
            self._starts.append(count)
            last, cr = b"", False
            with file.open("rb") as raw:
                with closing(_utf8(file, _unpacked(raw))) as chunks:
                    for chunk in chunks:
                        cr = cr or (not last and _ends_lines_with_cr(chunk))
                        chunk = chunk.replace(b"\r", b"\n") if cr else chunk
                        last = chunk[-1:]
                        count += chunk.count(b"\n")
                        yield chunk
            if last not in (b"", b"\n") and len(self.files) > 1:
                count += 1
                yield b"\n"


class Lines:
    """The lines of a stream, by their offsets."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def at(self, offset: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.readline(MAX_LINE_NBYTES)


def _files(path: Path) -> list[Path]:
    with _friendly(path):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return [path]
        if not stat.S_ISDIR(mode):
            raise TraceError(str(path), None, "it is not a regular file; a trace is read twice, so it cannot be a pipe")
        files = []
        for file in sorted(path.rglob("*")):
            if file.name.startswith(".") or file.is_dir():
                continue
            if not file.is_file():
                problem = (
                    "it is neither a file nor a folder, but a pipe or a broken link; remove it from the trace's folder"
                )
                raise TraceError(str(file), None, problem)
            files.append(file)
    if not files:
        raise TraceError(str(path), None, "it is a folder without a file; name a trace")
    return files


class _Chunks(io.RawIOBase):
    """A stream that reads from an iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any, /) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(into), len(self._rest))
        into[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _ends_lines_with_cr(head: bytes) -> bool:
    """Return whether a text that starts so has CR line ends. A CR at the very end may be half of a CRLF."""
    return b"\n" not in head and b"\r" in head[:-1]


def _unpacked(file: _Peekable) -> _Peekable:
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if file.peek(2)[:2] == _GZIP else file


def _utf8(path: Path, file: _Peekable) -> Generator[bytes]:
    """Read the file as UTF-8, without a byte order mark."""
    _refuse_foreign(path, file)
    if file.peek(2)[:2] in _WIDE:
        with io.TextIOWrapper(file, "utf-16", newline="\n") as text:
            while characters := text.read(_CHUNK_NBYTES):
                yield characters.encode()
        return
    if file.peek(3)[:3] == _BOM:
        file.read(3)
    while chunk := file.read(_CHUNK_NBYTES):
        yield chunk


def _refuse_foreign(path: Path, file: _Peekable) -> None:
    head = file.peek(512)[:512]
    if head.startswith(_PICKLE):
        raise TraceError(
            str(path),
            None,
            "a Python pickle. Unpickling can run any code that the file names, so replay never does it; "
            "docs/traces.md shows how to write such a dump as JSON lines where it was made",
        )
    if head.startswith(_GZIP):
        raise TraceError(str(path), None, "compressed twice; unpack it once")
    if head[_TAR_MAGIC] == b"ustar":
        raise TraceError(str(path), None, "a tar archive; unpack it first")
    for magic, problem in _OTHERS.items():
        if head.startswith(magic):
            raise TraceError(str(path), None, problem)


@contextmanager
def _friendly(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise TraceError(str(path), None, "the gzip data ends early, as after a broken download") from None
    except (zlib.error, gzip.BadGzipFile) as problem:
        raise TraceError(str(path), None, f"damaged gzip data: {problem}") from None
    except UnicodeError as problem:
        raise TraceError(str(path), None, f"not the UTF-16 text that its first two bytes promise: {problem}") from None
    except OSError as problem:
        raise TraceError(str(path), None, problem.strerror or str(problem)) from None

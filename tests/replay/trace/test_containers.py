"""Containers of traces are recognised by content. Others are refused by name, with a remedy."""

from __future__ import annotations

import gzip
import io
import lzma
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import pytest

from tensorferry.codecs.errors import TraceError
from tensorferry.replay.trace.convert import cut
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.replay.trace.selection import Selection
from tensorferry.replay.trace.trace_file import Recording

DATA = Path(__file__).parents[2] / "data" / "traces"
PLAIN = DATA / "azure_lmm.csv"


def tar(path: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(path, arcname="TIMESTAMP,ContextTokens,GeneratedTokens.csv")
    return file.getvalue()


def empty_zip() -> bytes:
    file = io.BytesIO()
    zipfile.ZipFile(file, "w").close()
    return file.getvalue()


def database(folder: Path) -> bytes:
    path = folder / "made.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table trace (at_ms, text_tokens, output_tokens)")
    connection.close()
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tar", "a tar archive; unpack it first"),
        ("zip", "an empty zip archive"),
        ("sqlite", "an SQLite database; write its table as CSV first"),
        ("lzma", "compressed with lzma; unpack it first"),
        ("7z", "a 7z archive; unpack it first"),
        ("rar", "a RAR archive; unpack it first"),
        ("lz4", "compressed with lz4; unpack it first"),
        ("avro", "an Avro file; write it as CSV or JSON lines first"),
        ("hdf5", "an HDF5 file; write it as CSV or JSON lines first"),
    ],
)
def test_an_archive_is_refused_by_name_with_the_remedy(tmp_path: Path, kind: str, told: str, packed: bool) -> None:
    made = {
        "tar": lambda: tar(PLAIN),
        "zip": empty_zip,
        "sqlite": lambda: database(tmp_path),
        "lzma": lambda: lzma.compress(PLAIN.read_bytes(), format=lzma.FORMAT_ALONE),
        "7z": lambda: b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(56),
        "rar": lambda: b"Rar!\x1a\x07\x01\x00" + bytes(56),
        "lz4": lambda: b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(56),
        "avro": lambda: b"Obj\x01\x04\x14avro.codec" + bytes(56),
        "hdf5": lambda: b"\x89HDF\r\n\x1a\n" + bytes(56),
    }[kind]()
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(made) if packed else made)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize("encode", ["utf-8", "utf-8-sig", "utf-16", "gzip"])
def test_lines_that_end_with_cr_alone_are_lines(tmp_path: Path, encode: str) -> None:
    text = PLAIN.read_text().replace("\n", "\r")
    path = tmp_path / "mac.csv"
    path.write_bytes(gzip.compress(text.encode()) if encode == "gzip" else text.encode(encode))
    assert read_trace(path).requests == read_trace(PLAIN).requests
    copy = tmp_path / "copy.csv"
    cut(Recording(path), Selection(), copy)
    assert read_trace(copy).requests == read_trace(PLAIN).requests


def test_a_cr_within_a_row_of_a_file_with_lf_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"at_ms": 1,\r "text_tokens": 5, "output_tokens": 1}\n')
    assert [request.text_tokens for request in read_trace(path).requests] == [5]


def test_parts_of_a_folder_may_end_their_lines_differently(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    lines = PLAIN.read_text().splitlines()
    (folder / "1.csv").write_text("\r".join(lines[:5]))
    (folder / "2.csv").write_text("\n".join([lines[0], *lines[5:]]))
    assert len(read_trace(folder).requests) == len(read_trace(PLAIN).requests)

"""The accepted image formats, recognised by content and never by name, and the reader of each."""

from __future__ import annotations

import re
import struct

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.avif import read_avif
from tensorferry.stages.processors.image_headers.container import ACCEPTED, Container
from tensorferry.stages.processors.image_headers.gif_webp import read_gif, read_webp
from tensorferry.stages.processors.image_headers.jpeg import read_jpeg
from tensorferry.stages.processors.image_headers.png import read_png
from tensorferry.stages.processors.image_headers.tiff import read_tiff

#: Start of a file -> its reader. Each reader takes a memoryview of the file, walks it in bounded time and memory, and
#: raises BadMedia for broken or excessive parts.
_ACCEPTED = (
    (rb"\xff\xd8\xff", read_jpeg),
    (rb"\x89PNG\r\n\x1a\n", read_png),
    (rb"RIFF.{4}WEBP", read_webp),
    (rb"GIF8[79]a", read_gif),
    (rb"II[*+]\x00|MM\x00[*+]", read_tiff),
    (rb".{4}ftyp(?:avif|avis|mif1|msf1)", read_avif),
    (rb"BM", lambda view: Container("BMP", view, None)),
)
#: Start of a file -> its kind, which the refusal names.
_REFUSED = (
    (rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51", "JPEG 2000"),
    (rb"\x00\x00\x00\x0cJXL |\xff\x0a", "JPEG XL"),
    (rb".{4}ftyp(?:hei|hev)", "HEIC"),
    (rb".{4}ftyp", "MP4 or QuickTime"),
    (rb"(?i:\s*<(?:\?xml|svg|!--|!doctype|html))", "SVG, XML or HTML"),
    (rb"%PDF", "PDF"),
    (rb"%!PS", "PostScript"),
    (rb"\x00\x00[\x01\x02]\x00", "ICO"),
    (rb"8BPS", "Photoshop"),
    (rb"P[1-7fF]\s", "PNM"),
    (rb"qoif", "QOI"),
    (rb"DDS ", "DDS"),
    (rb"\x76\x2f\x31\x01", "OpenEXR"),
    # gzip, zip, zstd, bzip2, xz, 7z, rar; cabinet, LZ4, compress, lzip, framed Brotli (bare Brotli has no signature).
    (rb"\x1f\x8b|PK\x03\x04|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ\x00|7z\xbc\xaf\x27\x1c|Rar!", "a compressed file"),
    (rb"MSCF|\x04\x22\x4d\x18|\x1f\x9d|LZIP|\xce\xb2\xcf\x81", "a compressed file"),
    (rb".{257}ustar", "a tar archive"),
    (rb"07070[127]|\xc7\x71|\x71\xc7", "a cpio archive"),
    (rb"!<arch>\n", "an ar archive"),
    (rb"SQLite format 3\x00", "an SQLite database"),
    (rb"ORC", "an ORC file"),
    (rb"PAR1", "a Parquet file"),
    (rb"ARROW1", "an Arrow file"),
    (rb"Obj\x01", "an Avro file"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file"),
)
_READERS = tuple((re.compile(start, re.DOTALL), reader) for start, reader in _ACCEPTED)
_NAMES = tuple((re.compile(start, re.DOTALL), name) for start, name in _REFUSED)


def read_container(data: bytes | memoryview) -> Container:
    """Read an encoded image's container; the result may refer to `data`, which must be contiguous.

    Raises BadMedia for an empty file, a file that is no image, a format that is not accepted (which it names), and a
    broken or excessive structure.
    """
    view = memoryview(data).cast("B")
    if not len(view):
        raise BadMedia("the file is empty")
    for start, reader in _READERS:
        if start.match(view):
            try:
                return reader(view)
            except (IndexError, OverflowError, struct.error):
                raise BadMedia("truncated: the file ends within its header") from None
    for start, name in _NAMES:
        if start.match(view):
            raise BadMedia(f"{name} is not accepted; {ACCEPTED}")
    raise BadMedia(f"the file is not an image of a known format (it starts with {bytes(view[:8])!r}); {ACCEPTED}")

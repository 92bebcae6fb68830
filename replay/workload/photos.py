"""Photographs that stand in for images whose bytes a trace does not have.

Noise would be the easy filler and the wrong one: it does not compress, so a 500 x 500 JPEG of it is several
times the size of a photo's, and every buffer on the way is sized by that.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from PIL import Image, ImageOps

from tensorferry.codecs.errors import FerryError

JPEG_QUALITY = 85
MAX_PHOTOS = 16  #: of a folder; decoded they lie in memory together, up to 12 MiB each
MAX_PHOTO_SIDE = 2048  #: larger ones are reduced once, when loaded
MAX_PHOTO_PIXELS = 64_000_000  #: larger ones are passed over, told from their header


class PhotoError(FerryError):
    """There is no photo to make images from."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class Photo:
    """A decoded photo, upright, RGB. `jpeg` is thread-safe: it only reads."""

    def __init__(self, name: str, image: Image.Image) -> None:
        self.name, self._image = name, image

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self._image.width / self._image.height

    def jpeg(self, width: int, height: int) -> bytes:
        """The middle of the photo as a JPEG of exactly this size; the same bytes every time (under one version
        of Pillow and its libjpeg). Cropped to the aspect ratio rather than squeezed, as a user's photo would be.
        """
        full_width, full_height = self._image.size
        scale = min(full_width / width, full_height / height)
        crop_width, crop_height = min(full_width, width * scale), min(full_height, height * scale)
        left, top = (full_width - crop_width) / 2, (full_height - crop_height) / 2
        box = (left, top, left + crop_width, top + crop_height)
        image = self._image.resize((width, height), Image.Resampling.BICUBIC, box, reducing_gap=2.0)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=JPEG_QUALITY)
        return out.getvalue()


def load_photos(folder: Path | None) -> list[Photo]:
    """The first MAX_PHOTOS readable photos of a folder in the order of their names; None: the bundled three.

    Files that are no usable image are passed over. Raises PhotoError when none is left.
    """
    if folder is None:
        bundled = resources.files("tensorferry.replay.workload").joinpath("photos")
        files = sorted((file for file in bundled.iterdir() if file.name.endswith(".jpg")), key=lambda file: file.name)
        return [_load(file.name, file.read_bytes()) for file in files]
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as problem:
        raise PhotoError(str(folder), problem.strerror or str(problem)) from None
    photos: list[Photo] = []
    for path in paths:
        if len(photos) == MAX_PHOTOS:
            break
        try:
            photos.append(_load(path.name, path.read_bytes()))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises for bad files
            continue
    if not photos:
        raise PhotoError(str(folder), "no image in it that can be read")
    return photos


def _load(name: str, data: bytes) -> Photo:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF, many pixels: decided here, not printed
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PHOTO_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            image.draft("RGB", (MAX_PHOTO_SIDE, MAX_PHOTO_SIDE))
            upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((MAX_PHOTO_SIDE, MAX_PHOTO_SIDE))
    return Photo(name, upright)


def names(photos: Sequence[Photo]) -> list[str]:
    return [photo.name for photo in photos]

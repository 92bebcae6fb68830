"""Photos that replace images whose bytes a trace does not have.

Noise would be wrong: it does not compress, so a 500 x 500 JPEG of noise is several times as large as a photo's, and
the sizes of all buffers depend on that.
"""

from __future__ import annotations

import io
import warnings
from importlib import resources
from pathlib import Path

from PIL import Image, ImageOps

from tensorferry.codecs.errors import FerryError

JPEG_QUALITY = 85
MAX_PHOTOS = 16  #: of a folder; all are held in memory decoded, each of up to 12 MiB
MAX_PHOTO_SIDE = 2048  #: larger photos are reduced as they are loaded
MAX_PHOTO_PIXELS = 64_000_000  #: photos with more, by their header, are skipped


class PhotoError(FerryError):
    """There is no photo to make images from."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class Photo:
    """A decoded photo, upright and RGB. `jpeg` is thread-safe, since it only reads."""

    def __init__(self, name: str, image: Image.Image) -> None:
        self.name, self._image = name, image

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self._image.width / self._image.height

    def jpeg(self, width: int, height: int) -> bytes:
        """Encode the middle of the photo as a JPEG of exactly this size, cropped to the aspect ratio.

        The bytes are the same every time, under one version of Pillow and its libjpeg.
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
    """Load the first MAX_PHOTOS readable photos of a folder, by name. None means the three bundled photos.

    Files that are not usable images are skipped. Raises PhotoError if no photo is left.
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
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's errors for bad files
            continue
    if not photos:
        raise PhotoError(str(folder), "it has no image that can be read; name a folder of photos")
    return photos


def _load(name: str, data: bytes) -> Photo:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF and many pixels, which are handled here
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PHOTO_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            image.draft("RGB", (MAX_PHOTO_SIDE, MAX_PHOTO_SIDE))
            upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((MAX_PHOTO_SIDE, MAX_PHOTO_SIDE))
    return Photo(name, upright)

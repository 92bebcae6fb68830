"""A bound for the cost of planning one file: the pieces that Python walks over are counted."""

from __future__ import annotations

from tensorferry.stages.processors.base import BadMedia

#: Steps of one piece (a chunk, segment, box, item), about a microsecond each; of a GIF's block, one.
PIECE = 16
#: Steps that a file may cost for each started MiB, and in all: 12,288 pieces a MiB, 32,768 a file.
#: Encoders write 16 to 128 PNG chunks a MiB, and 4,113 blocks a MiB of GIF.
STEPS_A_MIB, MOST_STEPS = 3 << 16, 1 << 19


class Work:
    """The remaining steps of one file. `kind` is the format's name, for the error."""

    __slots__ = ("_kind", "_most", "left")

    def __init__(self, kind: str, nbytes: int) -> None:
        """nbytes: of the whole file."""
        self._kind = kind
        self._most = self.left = min(MOST_STEPS, STEPS_A_MIB * ((nbytes >> 20) + 1))

    def piece(self, pieces: int = 1) -> None:
        """Count the next pieces. Raises BadMedia beyond the bound."""
        self.left -= PIECE * pieces
        if self.left < 0:
            raise self.spent()

    def spent(self) -> BadMedia:
        return BadMedia(
            f"{self._kind} has too many pieces for its size: a file of this length may have {self._most // PIECE} "
            f"chunks, segments or boxes (or {self._most} GIF blocks); write it again with any image program"
        )

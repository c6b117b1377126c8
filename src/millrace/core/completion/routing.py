"""The experts that the engine chose for each sampled token, in a model with experts."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Routing:
    """The experts of each position: `width` of them, those of the first layer with experts first.

    The position of a sampled token is the token before it, whose forward pass the token was sampled from.

    experts  uint8 or uint16 numbers, in order of position; the largest number everywhere: not recorded
    """

    width: int
    experts: array[int] = field(default_factory=lambda: array("B"))

    @staticmethod
    def typecode(num_experts: int) -> str:
        return "B" if num_experts < 2**8 else "H"

    def not_recorded(self, num_positions: int) -> Routing:
        """As many positions of this width."""
        nothing = b"\xff" * (self.experts.itemsize * self.width * num_positions)
        return Routing(self.width, array(self.experts.typecode, nothing))

    def part(self, start: int, stop: int) -> Routing:
        """A copy of the positions from `start` to `stop`."""
        return Routing(self.width, self.experts[start * self.width : stop * self.width])

    def extend(self, other: Routing) -> None:
        """Raises: ValueError: the two are of different models."""
        if (self.width, self.experts.typecode) != (other.width, other.experts.typecode):
            raise ValueError(f"columns do not align: {self.width} experts a position, and then {other.width}")
        self.experts += other.experts

    def aligned(self, num_positions: int) -> bool:
        return len(self.experts) == self.width * num_positions

    # ------------------------------------------------------------ in files

    def to_bytes(self) -> bytes:
        """The type of the numbers, the width, and the numbers, little-endian."""
        return self.experts.typecode.encode() + self.width.to_bytes(4, "little") + _little(self.experts)

    @staticmethod
    def from_bytes(data: bytes) -> Routing:
        """Raises: ValueError: these are not such bytes."""
        if data[:1] not in (b"B", b"H"):
            raise ValueError(f"the numbers of experts are of the type {data[:1]!r}")
        stored = array(data[:1].decode(), data[5:])
        return Routing(int.from_bytes(data[1:5], "little"), array(stored.typecode, _little(stored)))


def _little(numbers: array[int]) -> bytes:
    if sys.byteorder != "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()

"""One colour, marker and dash pattern for each method, the same in every figure.

The colours are those of Okabe and Ito, which readers with any kind of colour vision can tell apart.
Markers and dash patterns differ as well, so that figures can be read without colours.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

__all__ = ["BLACK", "BLUE", "GRAY", "GREEN", "RED", "SKY", "YELLOW", "Look", "look_of"]

BLACK, GRAY, BLUE, RED = "#000000", "#6b6b6b", "#0072B2", "#D55E00"
WINE = "#882255"  # of Paul Tol, because there are more methods than colours of Okabe and Ito
GREEN, PURPLE, YELLOW, ORANGE, SKY = "#009E73", "#CC79A7", "#F0E442", "#E69F00", "#56B4E9"


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
        colour: of lines and markers, as ``#rrggbb``.
        marker: Matplotlib's letter of the marker.
        dashes: Matplotlib's pattern of the line.
    """

    colour: str
    marker: str
    dashes: str

    def options(self) -> dict[str, Any]:
        """Keyword arguments of Matplotlib's ``plot``. Filled markers get a thin black edge."""
        is_cross = self.marker in ("x", "+")
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markeredgecolor": self.colour if is_cross else BLACK,
            "markeredgewidth": 1.5 if is_cross else 0.6,
        }


_LOOKS = {
    "matrix-free": Look(BLACK, "x", "-"),
    "hierarchical": Look(BLUE, "o", "-"),
    "low rank": Look(RED, "s", "-"),
    "K-FAC block-diagonal": Look(GREEN, "^", "--"),
    "K-FAC block-tridiagonal": Look(PURPLE, "v", "--"),
    "K-FAC full": Look(YELLOW, "P", "--"),
    "EKFAC": Look(ORANGE, "D", "-."),
    "diagonal": Look(GRAY, "<", ":"),
    "blocks per unit": Look(SKY, ">", "-."),
    "H.factorize": Look(WINE, "+", "-"),
}

# Methods that have no entry above take a colour and a marker from these, which no entry uses.
_OTHER_COLOURS = ("#8c510a", "#6a3d9a", "#01665e", "#7f0000", "#4d4d9f", "#b2182b")
_OTHER_MARKERS = ("h", "*", "X", "p", "8", "H", "d")


def look_of(method: str) -> Look:
    """How a method is drawn, by its name.

    A method without an entry gets a look that depends on its name alone, so that it looks the same
    in all figures and on all machines.
    """
    known = _LOOKS.get(method)
    if known is not None:
        return known
    number = zlib.crc32(method.encode())
    number, colour = divmod(number, len(_OTHER_COLOURS))
    marker = number % len(_OTHER_MARKERS)
    return Look(_OTHER_COLOURS[colour], _OTHER_MARKERS[marker], "--")

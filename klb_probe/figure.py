"""The figure every plot of ours is: matplotlib's, which also shows itself in a notebook."""

from __future__ import annotations

import io

import matplotlib.figure

_DPI = 80  # of what a notebook shows; saved figures have their own


class Figure(matplotlib.figure.Figure):
    """Shown once where a cell ends with it, with ``%matplotlib inline`` or without.

    It is not one of pyplot's figures, so nothing shows it a second time, and no backend is chosen for the user.
    """

    def _repr_png_(self) -> bytes:
        """What Jupyter shows where ``%matplotlib inline`` has not said how."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_DPI)
        return buffer.getvalue()

"""Wide data in as many coordinates as there are rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class RowSpace:
    """Principal coordinates of rows: ``coordinates = rows @ basis``, losing nothing of the rows.

    A weight found under an L2 penalty lies in the span of the rows, so that fitting in these coordinates is exact.

    Attributes:
        coordinates: ``[row, r]``, r <= min(row, d); their columns are orthogonal.
        basis: ``[d, r]``, orthonormal columns.
        squares: Squared singular values of the rows, ``[r]``, all above 0.
    """

    coordinates: np.ndarray
    basis: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> RowSpace:
        """From the smaller of the two Gram matrices of ``rows [row, d]``; on the GPU if there is one.

        In float64: the squares of standardised residuals span six orders of magnitude and more.
        """
        x = torch.from_numpy(rows).to("cuda" if torch.cuda.is_available() else "cpu", torch.float64)
        wide = x.shape[0] <= x.shape[1]
        squares, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
        kept = squares > squares[-1] * 1e-12
        squares, vectors = squares[kept], vectors[:, kept]
        if wide:
            coordinates = vectors * squares.sqrt()
            basis = x.T @ (vectors / squares.sqrt())
        else:
            coordinates, basis = x @ vectors, vectors
        return cls(coordinates.cpu().numpy(), basis.cpu().numpy(), squares.cpu().numpy())

"""What is known of some rows, carried over to every column of a pool.

Everything that grows with the pool is kept from one suggestion to the next: with L the Cholesky
factor of the rows' covariance, `V = L^-1 K(rows, columns)` gets one row more at each trial, and is
made anew only when the hyperparameters are fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.search.covariance import Kernel
from tuner.search.encoding import Array

__all__ = ["ROOM", "Rows"]

ROOM = 1.25  # for so many times the rows there are, and a few
NUGGET = 1e-5  # besides noise: V is float32
CHUNK = 4_000_000  # elements of V computed at a time: 16 MB


class Rows:
    """The factor of the rows' covariance under a kernel's hyperparameters of now, and V.

    Args:
        kernel: may not be fitted again while this is in use.
        columns: [columns, coordinates], points of the pool, float32.
        names: what names each row.
        points: [rows, coordinates], float64.

    Attributes:
        names: of the rows, in order.
        points: of the rows.
        capacity: how many rows there may be.
        explained: of each column's variance, by the rows.
    """

    def __init__(
        self, kernel: Kernel, columns: Array, names: Sequence[int], points: Array
    ) -> None:
        from scipy.linalg import solve_triangular

        self._kernel, self._columns = kernel, columns
        self.names, self.points = list(names), points
        count = len(points)
        self.capacity = math.ceil(count * ROOM) + 64
        own = kernel.covariance(points, points)
        own[np.arange(count), np.arange(count)] += self._nugget
        self._lower = np.zeros((self.capacity, self.capacity))
        self._lower[:count, :count] = np.linalg.cholesky(own)
        self._v = np.zeros((self.capacity, len(columns)), dtype=np.float32)
        factor, single = self.lower.astype(np.float32), points.astype(np.float32)
        step = max(1, CHUNK // count)
        for start in range(0, len(columns), step):
            part = slice(start, start + step)
            cross = kernel.covariance(single, columns[part])
            self._v[:count, part] = solve_triangular(factor, cross, lower=True, check_finite=False)
        self.explained = np.einsum("rc,rc->c", self.v, self.v).astype(float)

    @property
    def _nugget(self) -> float:
        return self._kernel.noise + NUGGET

    @property
    def lower(self) -> Array:
        """L: [rows, rows]."""
        return self._lower[: len(self.names), : len(self.names)]

    @property
    def v(self) -> Array:
        """V: [rows, columns], float32."""
        return self._v[: len(self.names)]

    def along(self, points: Array) -> Array:
        """Return `L^-1 K(rows, points)`, float64."""
        return self.solved(self._kernel.covariance(self.points, points))

    def solved(self, targets: Array) -> Array:
        """Return `L^-1 targets`."""
        from scipy.linalg import solve_triangular

        found: Array = solve_triangular(self.lower, targets, lower=True, check_finite=False)
        return found

    def add(self, name: int, point: Array) -> None:
        """Append a row; `point` is [1, coordinates]."""
        count = len(self.names)
        along = self.along(point)[:, 0]
        own = float(self._kernel.variance(point)[0] + self._nugget - along @ along)
        pivot = math.sqrt(max(own, self._nugget / 2))
        cross = self._kernel.covariance(point.astype(np.float32), self._columns)[0]
        row = (cross - along.astype(np.float32) @ self.v) / np.float32(pivot)
        self._v[count] = row
        self._lower[count, :count], self._lower[count, count] = along, pivot
        self.explained += row.astype(float) ** 2
        self.names.append(name)
        self.points = np.concatenate([self.points, point])

    def imputed(self, targets: Array, unsure: Array, bound: Array) -> Array:
        """Return what the sure rows let expect of each row, above `bound`, where it is unsure."""
        from scipy.linalg import solve_triangular
        from scipy.special import log_ndtr

        own, sure = self.lower @ self.lower.T, ~unsure
        factor = np.linalg.cholesky(own[np.ix_(sure, sure)])
        cross = solve_triangular(factor, own[np.ix_(sure, unsure)], lower=True)
        mean = cross.T @ solve_triangular(factor, targets[sure], lower=True)
        deviation = np.sqrt(np.maximum(np.diag(own)[unsure] - (cross**2).sum(axis=0), 1e-8))
        z = np.clip((bound[unsure] - mean) / deviation, -30.0, 30.0)
        hazard = np.exp(-0.5 * z * z - 0.5 * math.log(2.0 * math.pi) - log_ndtr(-z))
        found = targets.copy()
        found[unsure] = np.maximum(mean + deviation * hazard, bound[unsure])
        return found

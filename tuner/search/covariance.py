"""How alike two configurations are: the kernel of a Gaussian process.

Two kernels are added: a Matern 5/2 over where parameters lie, with a length scale each; and an
exponential of the weighted Hamming distance, which lets a value be special whatever its
neighbours are. A linear kernel is added over whether a number is no power of two, and over a prior
(see `transfer`), if there is one.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 4 and 5.
"""

from __future__ import annotations

import math

import numpy as np

from tuner.search.encoding import Array, Encoding

__all__ = ["Kernel"]

JITTER = 1e-6  # on the diagonal; the targets have a variance of 1
SQRT5 = math.sqrt(5.0)
FIT_STEPS = 25  # of the optimiser, from where the last fit ended


class Kernel:
    """The covariance of two sets of points, and its hyperparameters.

    Points are [configurations, columns]: those of an `Encoding`, then the priors.

    `theta` holds logarithms (`log_probability`: of it and the targets that it was fitted to, up to
    a constant): a length scale for each place and a Hamming weight for each parameter, then the
    variances of Matern, Hamming, each linear column, and noise. They have a normal prior, wide
    enough to be forgotten soon; without it twelve trials would fit some twenty of them.
    """

    def __init__(self, encoding: Encoding, num_priors: int) -> None:
        widths = [table.shape[1] for _, table in encoding.places]
        self._lengths = np.repeat(np.arange(len(widths)), widths)
        self._value_indices = np.repeat(np.arange(len(encoding.sizes)), encoding.sizes)
        self._ends = len(self._lengths), len(self._lengths) + len(self._value_indices)
        parts = [
            (len(widths), 1.0, 0.8),  # the whole range: smooth until shown otherwise
            (len(encoding.sizes), 0.3, 1.0),
            (1, 1.0, 1.0),
            (1, 0.3, 1.0),
            (encoding.num_linear + num_priors, 0.3, 1.5),
            (1, 3e-3, 1.5),
        ]
        self.mean = np.concatenate([np.full(n, math.log(at)) for n, at, _ in parts])
        self.spread = np.concatenate([np.full(n, sd) for n, _, sd in parts])
        self.theta = self.mean.copy()
        self.log_probability = 0.0
        self._splits = np.cumsum([n for n, _, _ in parts])[:-1]

    def split(self, theta: Array) -> list[Array]:
        """Return inverse squared lengths, weights, variances: Matern, Hamming, linear, noise."""
        lengths, *rest = np.split(theta, self._splits)
        return [np.exp(-2.0 * lengths), *[np.exp(part) for part in rest]]

    @property
    def noise(self) -> float:
        """The variance of noise."""
        return float(np.exp(self.theta[-1])) + JITTER

    def variance(self, points: Array) -> Array:
        """Return the variance of each point before anything is known, without noise."""
        _, _, matern, hamming, weights, _ = self.split(self.theta)
        total: Array = matern[0] + hamming[0] + (points[:, self._ends[1] :] ** 2) @ weights
        return total

    def covariance(self, left: Array, right: Array) -> Array:
        """Return [left, right] covariances, in the points' precision."""
        inverse, weights, matern, hamming, slopes, _ = self.split(self.theta)
        first, second = self._ends
        r = _squared(left[:, :first], right[:, :first], inverse[self._lengths])
        np.sqrt(r, out=r)
        r *= SQRT5
        total = np.exp(-r)
        total *= 1.0 + r + r * r / 3.0
        total *= matern[0]
        between = slice(first, second)
        # Two configurations that differ in a parameter differ in two of its value indices.
        unlike = _squared(left[:, between], right[:, between], 0.5 * weights[self._value_indices])
        np.exp(-unlike, out=unlike)
        unlike *= hamming[0]
        total += unlike
        if len(slopes):
            total += (left[:, second:] * slopes.astype(left.dtype)) @ right[:, second:].T
        return total

    def fit(self, points: Array, targets: Array) -> None:
        """Take the most probable hyperparameters, starting from those there are.

        Args:
            points: [rows, columns].
            targets: [rows], of mean 0 and variance 1.
        """
        from scipy.linalg import cho_solve
        from scipy.linalg.lapack import dpotrf, dpotri
        from scipy.optimize import minimize

        (first, second), size = self._ends, len(targets)
        points = points.astype(float)
        distances = _by_owner(points[:, :first], self._lengths)
        mismatches = 0.5 * _by_owner(points[:, first:second], self._value_indices)
        traits = points[:, second:]
        linear = np.einsum("ip,jp->pij", traits, traits).reshape(-1, size**2)
        diagonal = np.arange(size)

        def objective(theta: Array) -> tuple[float, Array]:
            inverse, weights, matern, hamming, slopes, extra = self.split(theta)
            r = SQRT5 * np.sqrt(inverse @ distances)
            decay = matern[0] * np.exp(-r)
            smooth = decay * (1.0 + r + r * r / 3.0)
            special = hamming[0] * np.exp(-(weights @ mismatches))
            matrix = (smooth + special + slopes @ linear).reshape(size, size)
            matrix[diagonal, diagonal] += extra[0] + JITTER
            lower, info = dpotrf(matrix, lower=1, overwrite_a=1)
            if info:
                return 1e10, np.zeros_like(theta)
            alpha = cho_solve((lower, True), targets)
            value = 0.5 * targets @ alpha + np.log(np.diag(lower)).sum()
            full, _ = dpotri(lower, lower=1, overwrite_c=0)
            full = np.tril(full) + np.tril(full, -1).T
            slope = 0.5 * (full - np.outer(alpha, alpha))
            flat = slope.ravel()
            gradient = np.concatenate(
                [
                    distances @ (flat * decay * (1.0 + r)) * (5.0 / 3.0) * inverse,
                    -weights * (mismatches @ (flat * special)),
                    [flat @ smooth],
                    [flat @ special],
                    slopes * (linear @ flat),
                    [extra[0] * np.trace(slope)],
                ]
            )
            away = (theta - self.mean) / self.spread
            return float(value + 0.5 * away @ away), gradient + away / self.spread

        reach = 4 * self.spread
        found = minimize(
            objective,
            self.theta,
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(self.mean - reach, self.mean + reach, strict=True)),
            options={"maxiter": FIT_STEPS},
        )
        self.theta = found.x
        self.log_probability = -float(found.fun)


def _squared(left: Array, right: Array, scale: Array) -> Array:
    """Return [left, right], the weighted squared distances of two sets of points."""
    root = np.sqrt(scale).astype(left.dtype)
    left, right = left * root, right * root
    found: Array = left @ right.T
    found *= -2.0
    found += np.einsum("ij,ij->i", left, left)[:, None]
    found += np.einsum("ij,ij->i", right, right)[None]
    return np.maximum(found, 0.0, out=found)


def _by_owner(points: Array, owners: Array) -> Array:
    """Return [owners, pairs], the squared distances in the columns of each owner."""
    columns = [points[:, owners == owner] for owner in range(owners.max(initial=-1) + 1)]
    found = [_squared(part, part, np.ones(part.shape[1])) for part in columns]
    return np.array(found).reshape(len(columns), len(points) ** 2)

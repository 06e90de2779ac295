"""How alike two configurations are: as numbers, and as the kernel of a Gaussian process.

    Encoding     configurations as rows of codes, and how far two values are from each other
    Kernel       the covariance of two rows, and its hyperparameters

Two kernels are added: a Matern 5/2 over the parameters, numeric ones as log2, with a length scale
each, which knows that 64 is between 32 and 128; and an exponential of the weighted Hamming
distance, which lets a value be special whatever its neighbours are. With a prior (see `transfer`)
a linear kernel over it is added, whose weight is learnt.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tuner.trial import Value

__all__ = ["DENSE_UNTIL", "Array", "Encoding", "Kernel"]

Array = np.ndarray[Any, np.dtype[Any]]

DENSE_UNTIL = 40  # trials; until then the hyperparameters are fitted again at every one
JITTER = 1e-8  # on the diagonal; the targets have a variance of 1
SQRT5 = math.sqrt(5.0)


# ---- configurations as numbers --------------------------------------------------------------


class Encoding:
    """What the kernel needs to know of a space's parameters.

    Attributes:
        keep: the parameters with more than one digit; codes are the digits of these.
        points: for each of them [digits, 2], where its values and its absence lie: log2 scaled
            to [0, 1] on the first axis, absence off it; None where values have no order to use.
        sizes: how many digits each of them has.
    """

    def __init__(self, values: Sequence[Sequence[Value]], conditional: Sequence[bool]) -> None:
        """Take the values of each parameter, and whether it may be absent."""
        pairs = list(enumerate(zip(values, conditional, strict=True)))
        self.keep = [j for j, (v, may_lack) in pairs if len(v) + may_lack > 1]
        self.points = [_points(values[j]) for j in self.keep]
        self.sizes = [len(values[j]) + 1 for j in self.keep]

    def codes(self, digits: Array) -> Array:
        """Return [configurations, kept parameters], int32, of rows of a space's digits."""
        return np.ascontiguousarray(digits[:, self.keep], dtype=np.int32)

    def places(self, codes: Array) -> Array:
        """Return points of which close ones are much alike: [configurations, coordinates]."""
        # Two values without an order are half as far apart as the ends of a numeric one.
        columns = [
            np.eye(size)[column] * math.sqrt(0.125) if points is None else points[column]
            for points, column, size in zip(self.points, codes.T, self.sizes, strict=True)
        ]
        return np.column_stack(columns).astype(np.float32)


def _points(values: Sequence[Value]) -> Array | None:
    """Return where values lie; absence is about as far from all of them as the ends are."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(values) < 3:
        return None
    x = np.array(numbers, dtype=float)
    lowest = x.min()
    x = np.log2(x) if lowest > 0 else np.log2(x - lowest + 1.0)
    x = (x - x.min()) / (x.max() - x.min())
    return np.array([*[(xi, 0.0) for xi in x], (0.5, 1.0)])


# ---- the kernel -----------------------------------------------------------------------------


class Kernel:
    """The covariance of two configurations, and its hyperparameters.

    `theta` holds logarithms (`log_probability`: of it and the targets that it was fitted to, up to
    a constant): a length scale and a Hamming weight for each parameter, then the
    variances of Matern, Hamming, every prior, and noise. They have a normal prior, wide enough to
    be forgotten after some fifty trials; without it twelve trials would fit some twenty of them.
    """

    def __init__(self, encoding: Encoding, num_priors: int) -> None:
        self.encoding = encoding
        self.tables = [
            1.0 - np.eye(size) if p is None else ((p[:, None] - p[None]) ** 2).sum(axis=2)
            for p, size in zip(encoding.points, encoding.sizes, strict=True)
        ]
        self.num_parameters = len(encoding.sizes)
        self.num_priors = num_priors
        parts = [
            (self.num_parameters, 1.2, 0.6),  # the whole range: smooth until shown otherwise
            (self.num_parameters, 0.15, 0.7),
            (1, 0.7, 1.0),
            (1, 0.3, 1.0),
            (num_priors, 0.3, 1.5),
            (1, 1e-3, 1.5),
        ]
        self.mean = np.concatenate([np.full(n, math.log(at)) for n, at, _ in parts])
        self.spread = np.concatenate([np.full(n, sd) for n, _, sd in parts])
        self.theta = self.mean.copy()
        self.log_probability = 0.0
        self.ends = np.cumsum([n for n, _, _ in parts])

    def split(self, theta: Array) -> list[Array]:
        """Return inverse squared lengths, weights, variances: Matern, Hamming, priors, noise."""
        lengths, *rest = np.split(theta, self.ends[:-1])
        return [np.exp(-2.0 * lengths), *[np.exp(part) for part in rest]]

    @property
    def noise(self) -> float:
        """The variance of noise."""
        return float(np.exp(self.theta[-1]))

    def variance(self, priors: Array) -> Array:
        """Return the variance of each column before anything is known, without noise."""
        _, _, matern, hamming, weights, _ = self.split(self.theta)
        total: Array = matern[0] + hamming[0] + weights @ priors**2
        return total

    def covariance(self, left: Array, right: Array, priors: tuple[Array, Array]) -> Array:
        """Return [left, right] covariances, float32, of two [n, parameters] arrays of codes."""
        inverse, weights, matern, hamming, prior_weights, _ = self.split(self.theta)
        squared = np.zeros((len(left), len(right)), dtype=np.float32)
        for j, (table, scale) in enumerate(zip(self.tables, inverse, strict=True)):
            rows = (table * scale).astype(np.float32)[:, right[:, j]]
            squared += rows[left[:, j]]
        r = np.sqrt(squared, out=squared)
        r *= SQRT5
        total = np.exp(-r)
        total *= 1.0 + r + r * r / 3.0
        total *= np.float32(matern[0])
        mismatch = np.zeros_like(total)
        for j, weight in enumerate(weights):
            mismatch += np.float32(weight) * (left[:, j, None] != right[None, :, j])
        np.exp(-mismatch, out=mismatch)
        total += np.float32(hamming[0]) * mismatch
        for weight, a, b in zip(prior_weights, priors[0], priors[1], strict=True):
            total += np.outer(weight * a, b).astype(np.float32)
        return total

    def fit(self, codes: Array, priors: Array, targets: Array) -> None:
        """Take the most probable hyperparameters, starting from those there are.

        Args:
            codes: [rows, parameters].
            priors: [priors, rows].
            targets: [rows], of mean 0 and variance 1.
        """
        from scipy.linalg import cho_solve
        from scipy.linalg.lapack import dpotrf, dpotri
        from scipy.optimize import minimize

        distances = np.array(
            [t[codes[:, j]][:, codes[:, j]] for j, t in enumerate(self.tables)]
        ).reshape(self.num_parameters, len(codes) ** 2)
        mismatches = np.array(
            [codes[:, j, None] != codes[None, :, j] for j in range(self.num_parameters)],
            dtype=float,
        ).reshape(self.num_parameters, len(codes) ** 2)
        linear = np.array([np.outer(p, p) for p in priors]).reshape(
            self.num_priors, len(codes) ** 2
        )
        size, diagonal = len(targets), np.arange(len(targets))

        def objective(theta: Array) -> tuple[float, Array]:
            inverse, weights, matern, hamming, prior_weights, extra = self.split(theta)
            squared = inverse @ distances
            r = SQRT5 * np.sqrt(squared)
            decay = matern[0] * np.exp(-r)
            smooth = decay * (1.0 + r + r * r / 3.0)
            special = hamming[0] * np.exp(-(weights @ mismatches))
            matrix = (smooth + special + prior_weights @ linear).reshape(size, size)
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
                    prior_weights * (linear @ flat),
                    [extra[0] * np.trace(slope)],
                ]
            )
            away = (theta - self.mean) / self.spread
            return float(value + 0.5 * away @ away), gradient + away / self.spread

        found = minimize(
            objective,
            self.theta,
            jac=True,
            method="L-BFGS-B",
            bounds=list(
                zip(self.mean - 4 * self.spread, self.mean + 4 * self.spread, strict=True)
            ),
            options={"maxiter": 50 if size < DENSE_UNTIL else 15, "ftol": 1e-4},
        )
        self.theta = found.x
        self.log_probability = -float(found.fun)

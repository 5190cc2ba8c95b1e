"""Preconditioners: SVGD in the coordinates z = L^-1 (x - m) of the particles.

Scores become L^T s there and moves come back with L: matrix-valued SVGD with the constant preconditioner
L L^T (Wang, Tang, Bajaj and Liu, 2019, section 3.2). With L L^T the particles' own covariance the
sampler is affine invariant: a linear change of variables changes nothing but coordinates.
"""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "Preconditioner",
    "as_preconditioner",
    "centre",
    "covariance_factor",
    "diagonal_factor",
    "from_whitened",
    "to_whitened",
    "whitened_scores",
]


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    """How the factor L comes about.

    Attributes:
      factor: a function of the particles (N, d) giving L, (d, d) lower triangular, or (d,) for a diagonal
        one; positive on the diagonal.
      refresh_every: steps between two computations of L; None computes it once, from the first
        particles.
      name: shown in messages.
    """

    factor: Callable[[jax.Array], jax.Array]
    refresh_every: int | None = 5
    name: str = "function"

    def __post_init__(self):
        if not callable(self.factor):
            raise TypeError(f"factor must be a function of the particles, got {self.factor!r}")
        _check_period(self.refresh_every)

    def refreshed(self, particles: jax.Array, step: jax.Array, previous: jax.Array) -> jax.Array:
        """L at this step: the previous one, or a new one where it is due and finite."""
        period = self.refresh_every
        due = step == 0 if period is None else step % period == 0

        def new(previous):
            factor = self.factor(lax.stop_gradient(particles)).astype(previous.dtype)
            usable = jnp.all(jnp.isfinite(factor)) | (step == 0)
            return jnp.where(usable, factor, previous)

        return lax.cond(due, new, lambda previous: previous, previous)

    def check(self, particles) -> jax.ShapeDtypeStruct:
        """Shape and dtype of L for such particles; warns where they are too few for a covariance.

        Raises:
          ValueError: where L has neither the shape (d,) nor (d, d).
        """
        n, d = particles.shape
        shape = jax.eval_shape(self.factor, particles)
        if shape.shape not in ((d,), (d, d)):
            raise ValueError(
                f"the factor of the preconditioner must have shape ({d},) or ({d}, {d}), "
                f"got {shape.shape}"
            )
        if self.name == "covariance" and n <= d + 1:
            warnings.warn(
                f"{n} particles cannot whiten {d} dimensions: the covariance preconditioner needs "
                f"more than {d + 1}; the standard deviations alone are used instead",
                stacklevel=3,
            )
        return shape


def _check_period(refresh_every) -> None:
    if refresh_every is None or isinstance(refresh_every, jax.core.Tracer):
        return  # a hyperparameter that optax has injected is an array
    try:
        number = operator.index(refresh_every)
    except TypeError:
        raise TypeError(
            f"refresh_every must be a whole number or None, got {refresh_every!r}"
        ) from None
    if number < 1:
        raise ValueError(f"refresh_every must be at least 1 or None, got {number}")


def as_preconditioner(preconditioner, refresh_every: int | None = 5) -> Preconditioner | None:
    """The preconditioner that a user means.

    Args:
      preconditioner: None, "diagonal", "covariance", a ``Preconditioner``, a symmetric positive definite
        matrix (d, d) or variances (d,), or a function of the particles (N, d) that returns one of
        these.
      refresh_every: of "diagonal", "covariance" and functions.

    Raises:
      ValueError: for unknown names and for a matrix that is not symmetric positive definite.
      TypeError: for anything else.
    """
    if preconditioner is None or isinstance(preconditioner, Preconditioner):
        return preconditioner
    if isinstance(preconditioner, str):
        if preconditioner == "diagonal":
            return Preconditioner(diagonal_factor, refresh_every, "diagonal")
        if preconditioner == "covariance":
            return Preconditioner(covariance_factor, refresh_every, "covariance")
        raise ValueError(
            'preconditioner must be None, "diagonal", "covariance", a Preconditioner, a matrix or a '
            f"function, got {preconditioner!r}"
        )
    if callable(preconditioner):

        def factor(particles):
            return _square_root(jnp.asarray(preconditioner(particles)))

        return Preconditioner(factor, refresh_every)
    if isinstance(preconditioner, (jax.Array, np.ndarray, list, tuple)):
        matrix = jnp.asarray(preconditioner)
        constant = _checked_square_root(matrix)
        return Preconditioner(lambda particles: constant, None, "matrix")
    raise TypeError(
        'preconditioner must be None, "diagonal", "covariance", a Preconditioner, a matrix or a '
        f"function, got {type(preconditioner).__name__}"
    )


def _square_root(matrix: jax.Array) -> jax.Array:
    if matrix.ndim == 1:
        return jnp.sqrt(matrix)
    sds = jnp.sqrt(jnp.diagonal(matrix))
    return sds[:, None] * jnp.linalg.cholesky(matrix / sds[:, None] / sds[None, :])


def _checked_square_root(matrix: jax.Array) -> jax.Array:
    if matrix.ndim not in (1, 2) or matrix.shape != matrix.shape[:1] * matrix.ndim:
        raise ValueError(f"preconditioner must have shape (d,) or (d, d), got {matrix.shape}")
    if isinstance(matrix, jax.core.Tracer):
        return _square_root(matrix)
    if matrix.ndim == 2 and not np.allclose(matrix, matrix.T, rtol=1e-4):
        raise ValueError("preconditioner must be a symmetric matrix, got one that is not")
    factor = _square_root(matrix)
    smallest = np.min(np.diagonal(factor) if matrix.ndim == 2 else factor)
    if not (np.all(np.isfinite(factor)) and smallest > 0):
        raise ValueError("preconditioner must be positive definite, got a matrix that is not")
    return factor


def centre(particles: jax.Array) -> jax.Array:
    """The mean of the particles, (d,), without overflow of the sum."""
    first = particles[0]
    return first + jnp.mean(particles - first, axis=0)


def diagonal_factor(particles: jax.Array) -> jax.Array:
    """Standard deviations of the particles, (d,); 1 for a dimension in which they do not differ."""
    n = particles.shape[0]
    if n == 1:
        return jnp.ones_like(particles[0])
    x = particles - centre(particles)
    largest = jnp.max(jnp.abs(x), axis=0)
    # Rounding alone makes equal numbers differ from their mean.
    constant = largest <= 4 * jnp.finfo(x.dtype).eps * jnp.max(jnp.abs(particles), axis=0)
    largest = jnp.where(constant, 1.0, largest)
    # Squares of 1e30 overflow float32: the largest is divided out first.
    sds = largest * jnp.sqrt(jnp.sum((x / largest) ** 2, axis=0) / (n - 1))
    return jnp.where(constant, 1.0, sds)


def covariance_factor(particles: jax.Array) -> jax.Array:
    """L lower triangular, (d, d), with L L^T the covariance of the particles.

    The Cholesky factor of the correlation matrix, twice: the first one needs a little on the diagonal to
    exist at all, which hides the narrowest directions; in the coordinates that it whitens, the second one
    sees them (shifted CholeskyQR2: Fukaya et al., 2020). Standard deviations are divided out before,
    so units do not count. Resolves standard deviations down to about the rounding of the particles.

    Where N <= d + 1 no covariance of full rank exists: the standard deviations alone, (d,), are used.
    A dimension, or a direction, in which the particles do not differ keeps a positive pivot.
    """
    n, d = particles.shape
    sds = diagonal_factor(particles)
    if n <= d + 1:
        return sds
    z = (particles - centre(particles)) / sds
    first = _shifted_cholesky(z)
    z = to_whitened(first, z)
    spread = diagonal_factor(z)
    second = spread[:, None] * _shifted_cholesky(z / spread)
    product = _product(first, second)
    factor = sds[:, None] * product
    return jnp.where(jnp.all(jnp.isfinite(factor)), factor, jnp.diag(sds))


def _shifted_cholesky(z: jax.Array) -> jax.Array:
    n, d = z.shape
    correlation = _product(z.T, z) / (n - 1)
    # Of unit diagonal, but for dimensions in which the particles do not differ.
    missing = jnp.maximum(1 - jnp.diagonal(correlation), 0)
    shift = 4 * d * jnp.finfo(z.dtype).eps
    return jnp.linalg.cholesky(correlation + jnp.diag(missing + shift))


def to_whitened(factor: jax.Array | None, differences: jax.Array) -> jax.Array:
    """L^-1 v of rows v, (N, d)."""
    if factor is None:
        return differences
    if factor.ndim == 1:
        return differences / factor
    # Solving for N right-hand sides is slow on every platform; a product is not.
    return _product(differences, _inverse(factor).T)


def _inverse(factor: jax.Array) -> jax.Array:
    """L^-1 by halves: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]."""
    d = factor.shape[0]
    if d <= 16:  # LAPACK starts its threads above, which costs milliseconds on a busy machine
        identity = jnp.eye(d, dtype=factor.dtype)
        return lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    half = d // 2
    a, b = _inverse(factor[:half, :half]), _inverse(factor[half:, half:])
    corner = -_product(b, _product(factor[half:, :half], a))
    return jnp.block([[a, jnp.zeros_like(corner.T)], [corner, b]])


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def from_whitened(factor: jax.Array | None, moves: jax.Array) -> jax.Array:
    """L v of rows v, (N, d)."""
    if factor is None:
        return moves
    if factor.ndim == 1:
        return moves * factor
    return _product(moves, factor.T)


def whitened_scores(factor: jax.Array | None, scores: jax.Array) -> jax.Array:
    """L^T s of rows s, (N, d)."""
    if factor is None:
        return scores
    if factor.ndim == 1:
        return scores * factor
    return _product(scores, factor)

"""Stochastic SVGD: the sampler with the noise that makes it a Markov chain with the right law.

For a kernel of x - y SVGD's direction is the drift of a Langevin diffusion of all N particles at once, with
diffusion matrix K / N (in every dimension). Adding the noise of that diffusion, of covariance 2 eps K / N,
makes every particle's stationary law the target, whatever N (Gallego and Insua, 2018; Ma, Chen and Fox, 2015,
theorem 1). That drift has the divergence of K / N, where k(x_i, x_i) is differentiated in both arguments;
the direction has one of them. Other kernels need the second too: ``composite.divergence_remainder``.

Kernel noise is a draw of a Gaussian process at the particles. Random features draw it in O(N R d) for the
rbf and imq kernels and for the linear one; other kernels take the Cholesky factor of the N x N matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.arguments import at_least, check_real
from jsvgd.composite import (
    FunctionKernel,
    LinearKernel,
    as_kernel,
    divergence_remainder,
    terms_of,
)
from jsvgd.kernels import IMQ, RBF, Kernel
from jsvgd.preconditioner import centre, from_whitened, to_whitened
from jsvgd.sampler import SamplingAlgorithm, SVGDInfo, SVGDState
from jsvgd.transform import scale_by_svgd
from jsvgd.trees import check_particles, settled, to_matrix

__all__ = ["kernel_noise", "stochastic_svgd"]


def kernel_noise(
    rng_key: jax.Array,
    particles: jax.Array,
    bandwidth: jax.Array | float,
    *,
    kernel="rbf",
    num_features: int | None = 100,
) -> jax.Array:
    r"""Noise (N, d) with E[noise] = 0 and E[noise_ic noise_jc'] = k(x_i, x_j) if c = c', else 0.

    With random features (Rahimi and Recht, 2007), R = ``num_features`` frequencies w drawn anew in every
    call,

    .. math:: \xi(x) = R^{-1/2} \sum_r a_r \cos(w_r x) + b_r \sin(w_r x), \quad a_r, b_r \sim N(0, I_d)

    which has exactly the covariance k, for every R, and is the nearer to Gaussian the larger R. The imq
    kernel is a scale mixture of rbf kernels. The linear kernel needs d + 1 features and is exact.

    Args:
      rng_key: of ``jax.random.key``.
      particles: (N, d).
      bandwidth: h of the radial terms, a scalar or (d,).
      kernel: any kernel of ``svgd_direction``.
      num_features: R; None takes the Cholesky factor of the N x N kernel matrix: Gaussian, O(N^3).
        Kernels other than rbf, imq and linear always do.

    Returns:
      (N, d).
    """
    noise = jnp.zeros_like(particles)
    for i, (weight, term) in enumerate(terms_of(as_kernel(kernel))):
        key = jax.random.fold_in(rng_key, i)
        noise += jnp.sqrt(jnp.asarray(weight, noise.dtype)) * _term_noise(
            key, particles, bandwidth, term, num_features
        )
    return noise


def stochastic_svgd(
    logdensity_fn: Callable,
    step_size: float | Callable,
    *,
    kernel="rbf",
    bandwidth="no_log",
    num_features: int | None = 100,
    preconditioner=None,
    refresh_every: int | None = 5,
    temperature=1.0,
    precision: str = "high",
    implementation: str | None = None,
    score_batch_size: int | None = None,
) -> SamplingAlgorithm:
    """Stochastic SVGD (Gallego and Insua, 2018): x += eps phi(x) + N(0, 2 eps K / N).

    No optimiser: noise and drift belong to one step size, and the noise vanishes as N grows, where SVGD
    needs it least. As eps goes to 0, N independent draws of p^(1 / temperature) are a stationary law for
    every symmetric, positive definite kernel, if bandwidth and preconditioner are fixed (a number, a
    matrix); taken from the particles they move with them, and add a bias that falls with N. The drift
    of kernels that are no functions of x - y (``LinearKernel(centred=False)``, functions k(x, y)) has a
    term more than phi, ``jsvgd.composite.divergence_remainder`` / N. The linear kernel alone moves
    particles by affine maps: more than d + 1 of them keep the shape that they begin with. Particles that
    meet share their noise and part slowly: in one dimension with a handful of particles pairs stay
    together for long.

    Args:
      logdensity_fn: as in ``svgd``.
      step_size: eps, a number or an optax schedule.
      kernel, bandwidth, preconditioner, refresh_every, temperature, precision, implementation: as in
        ``scale_by_svgd``; kernels must be positive definite.
      num_features: of ``kernel_noise``.
      score_batch_size: as in ``svgd``.

    Returns:
      ``SamplingAlgorithm(init, step)``, which runs in ``jsvgd.run``; ``step`` uses its key.

    Raises:
      ValueError: for a step size that is not positive and unknown names.
      TypeError: for numbers that are none.

    Example:
      >>> import jax
      >>> sampler = stochastic_svgd(lambda x: -0.5 * x @ x, 0.1)
      >>> state = sampler.init(jax.random.normal(jax.random.key(0), (50, 2)))
      >>> state, info = sampler.step(jax.random.key(1), state)
      >>> state.particles.shape
      (50, 2)
    """
    if not callable(logdensity_fn):
        raise TypeError(
            f"logdensity_fn must be a function of one particle, got {type(logdensity_fn).__name__}"
        )
    if not callable(step_size):
        check_real("step_size", step_size, jnp.result_type(float))
        if not step_size > 0:
            raise ValueError(f"step_size must be positive, got {step_size}")
    if num_features is not None:
        num_features = at_least("num_features", num_features, 1)
    if score_batch_size is not None:
        score_batch_size = at_least("score_batch_size", score_batch_size, 1)
    kernel = as_kernel(kernel)
    transform = scale_by_svgd(
        kernel=kernel,
        bandwidth=bandwidth,
        preconditioner=preconditioner,
        refresh_every=refresh_every,
        temperature=temperature,
        precision=precision,
        implementation=implementation,
    )

    def init(particles, rng_key=None):
        del rng_key
        check_particles("particles", particles)
        particles = settled(jax.tree.map(jnp.asarray, particles))
        return SVGDState(particles, (), transform.init(particles))

    def step(rng_key, state, *args):
        score = jax.value_and_grad(lambda position: logdensity_fn(position, *args))
        if score_batch_size is None:
            log_densities, scores = jax.vmap(score)(state.particles)
        else:
            log_densities, scores = lax.map(score, state.particles, batch_size=score_batch_size)
        eps = step_size(state.step) if callable(step_size) else step_size
        minus_phi, transform_state = transform.update(
            jax.tree.map(jnp.negative, scores), state.transform_state, state.particles
        )
        x, from_matrix = to_matrix(state.particles)
        phi = -to_matrix(minus_phi)[0]
        factor = transform_state.factor
        z = x if factor is None else to_whitened(factor, x - centre(x))
        rest = divergence_remainder(z, kernel=kernel, moving=factor is not None) / x.shape[0]
        noise = kernel_noise(
            rng_key, z, transform_state.bandwidth, kernel=kernel, num_features=num_features
        )
        eps = jnp.asarray(eps, x.dtype)
        beyond_phi = eps * rest + jnp.sqrt(2 * eps / x.shape[0]) * noise
        moved = x + eps * phi + from_whitened(factor, beyond_phi)
        info = SVGDInfo(
            bandwidth=transform_state.bandwidth,
            direction_norm=_root_mean_square(phi),
            score_norm=_root_mean_square(to_matrix(scores)[0]),
            num_nonfinite=jnp.sum(~jnp.all(jnp.isfinite(moved), axis=1)).astype(jnp.int32),
            log_density=jnp.mean(log_densities),
        )
        return SVGDState(from_matrix(moved), (), transform_state), info

    return SamplingAlgorithm(init, step)


def _root_mean_square(rows):
    return jnp.sqrt(jnp.mean(jnp.sum(rows**2, axis=1)))


def _term_noise(key, x, bandwidth, kernel: Kernel, num_features):
    n, d = x.shape
    if isinstance(kernel, LinearKernel):
        coefficients = jax.random.normal(key, (d + 1, d), x.dtype)
        slopes = _product(x - kernel.origin(x), coefficients[1:])
        return kernel.offset**0.5 * coefficients[0] + slopes
    if num_features is None or kernel not in (RBF, IMQ):
        matrix = _kernel_matrix(kernel, x, bandwidth)
        # Rounding makes nearly coincident particles indefinite.
        jitter = 10 * n * jnp.finfo(x.dtype).eps * jnp.mean(jnp.diagonal(matrix))
        root = jnp.linalg.cholesky(matrix + jitter * jnp.eye(n, dtype=x.dtype))
        return _product(root, jax.random.normal(key, (n, d), x.dtype))
    frequency_key, scale_key, coefficient_key = jax.random.split(key, 3)
    frequencies = jax.random.normal(frequency_key, (d, num_features), x.dtype)
    frequencies /= jnp.broadcast_to(jnp.sqrt(bandwidth), (d,))[:, None].astype(x.dtype)
    if kernel is IMQ:
        # (1 + 2u)^(-1/2) = E exp(-2 g u) with g ~ Gamma(1/2, 1).
        g = jax.random.gamma(scale_key, 0.5, (num_features,), x.dtype)
        frequencies *= jnp.sqrt(2 * g)
    angles = _product(x - jnp.mean(x, axis=0), frequencies)
    a, b = jax.random.normal(coefficient_key, (2, num_features, d), x.dtype)
    return (_product(jnp.cos(angles), a) + _product(jnp.sin(angles), b)) / num_features**0.5


def _kernel_matrix(kernel: Kernel, x, bandwidth):
    if isinstance(kernel, FunctionKernel):
        return jax.vmap(jax.vmap(kernel.function, (None, 0)), (0, None))(x, x)
    difference = x[:, None] - x[None]
    return kernel.profile(jnp.sum(difference**2 / (2 * bandwidth), axis=-1))


def _product(a, b):
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

"""A metric on the cores: how much a change of the cores changes the whole table."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Cores = tuple[jax.Array, ...]

_FLOOR = 1e-4  # lower bound of the eigenvalues of an environment, relative to its largest


class Metric(NamedTuple):
    """Inverse roots of the environments of every core, ``[r_k, r_k]`` and ``[r_{k+1}, r_{k+1}]``.

    A change of core k alone, ``d[i]`` for its slices, changes the table by ``|A d[i] B|^2`` summed over the slices,
    where ``A A`` and ``B B`` are the Gram matrices of everything left and right of the core. In the whitened
    coordinates ``A d B``, the norm of a change is that of the change of the table, whatever the scales of the cores.
    Changes of different cores are treated as orthogonal, which is nearly the case.
    """

    left: tuple[jax.Array, ...]
    right: tuple[jax.Array, ...]

    def from_whitened(self, change: Cores) -> Cores:
        """The change of the cores with these whitened coordinates."""
        sides = zip(self.left, change, self.right, strict=True)
        return tuple(jnp.einsum("ab,ibqc,cd->iaqd", a, core, b) for a, core, b in sides)

    # The roots are symmetric, so the map is its own transpose.
    to_whitened = from_whitened


def table_metric(cores: Cores) -> Metric:
    """The metric at these cores."""
    end = jnp.ones((1, 1), cores[0].dtype)
    left, right = [end], [end]
    for core in cores[:-1]:
        left.append(jnp.einsum("ab,iaqc,ibqd->cd", left[-1], core, core))
    for core in reversed(cores[1:]):
        right.append(jnp.einsum("iaqc,ibqd,cd->ab", core, core, right[-1]))
    return Metric(tuple(map(_inverse_root, left)), tuple(map(_inverse_root, reversed(right))))


def _inverse_root(gram: jax.Array) -> jax.Array:
    """Inverse square root of a positive semi-definite matrix; 0 for the zero matrix."""
    values, vectors = jnp.linalg.eigh(gram)
    largest = values[-1]
    scale = jax.lax.rsqrt(jnp.maximum(values, _FLOOR * largest))
    return (vectors * jnp.where(largest > 0, scale, 0)[None, :]) @ vectors.T

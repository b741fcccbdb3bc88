"""Initial rows of keys: a function of a seed and the key alone, the same on every platform bit for bit.

An element is a whole number, interpolated in a table of quantiles, times a scale. Its only floating-point operation is
this product, which all platforms round alike.
"""

from __future__ import annotations

import dataclasses
import functools
from statistics import NormalDist
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jax_tt._base.arguments import as_number

# A quantile is stored in units of 2^-20 of the scale.
UNIT = 2**20
# Probabilities from 2^-32 to 1: octaves, each of so many equal segments. The next octave's first entry is repeated at
# the end of each.
OCTAVES, SEGMENTS = 32, 128


@dataclasses.dataclass(frozen=True)
class InitialRows:
    """How the elements of an initial row are distributed: a symmetric distribution around 0, or a constant.

    Attributes:
        scale: what quantiles are multiplied by.

    >>> import jax_tt
    >>> isinstance(jax_tt.dynamic.Normal(0.01), jax_tt.dynamic.InitialRows)
    True
    """

    scale: float
    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        expected = "a finite number within the range of float32"
        as_number(type(self).__name__, self.scale, expected, lambda x: np.isfinite(np.float32(x)))

    @property
    def factor(self) -> np.float32:
        """What a number of units is multiplied by."""
        return np.float32(self.scale / UNIT)

    def quantile(self, probability: float) -> float:
        """The absolute value that is exceeded with this probability, from 2^-32 to 1, if the scale is 1."""
        raise NotImplementedError

    @functools.cached_property
    def quantiles(self) -> np.ndarray:
        """`quantile` of ``(1 + segment / SEGMENTS) * 2^-(octave + 1)`` in units, int32 ``[OCTAVES, SEGMENTS + 1]``."""
        octave, segment = np.mgrid[:OCTAVES, : SEGMENTS + 1]
        probabilities = (1 + segment / SEGMENTS) * 2.0 ** -(octave + 1)
        found = [[round(self.quantile(p) * UNIT) for p in row] for row in probabilities.tolist()]
        return np.array(found, np.int32)


class Normal(InitialRows):
    """A normal distribution with standard deviation ``scale``, up to 6.2 standard deviations.

    >>> import jax_tt
    >>> jax_tt.dynamic.Normal(1.0).quantile(0.5) < 0.68 < jax_tt.dynamic.Normal(1.0).quantile(0.49)
    True
    """

    def quantile(self, probability: float) -> float:
        return NormalDist().inv_cdf(1 - probability / 2)


class TruncatedNormal(InitialRows):
    """A normal distribution cut off at two standard deviations, with standard deviation ``scale`` before the cut.

    >>> import jax_tt
    >>> round(jax_tt.dynamic.TruncatedNormal(1.0).quantile(2**-32), 3)
    2.0
    """

    def quantile(self, probability: float) -> float:
        inside = 2 * NormalDist().cdf(2) - 1
        return NormalDist().inv_cdf((1 + (1 - probability) * inside) / 2)


class Uniform(InitialRows):
    """A uniform distribution between ``-scale`` and ``scale``.

    >>> import jax_tt
    >>> jax_tt.hash_table(64, 8, initializer=jax_tt.dynamic.Uniform(0.1)).initializer.scale
    0.1
    """

    def quantile(self, probability: float) -> float:
        return 1 - probability


class Constant(InitialRows):
    """``scale`` in every element.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(64, 8, initializer=jax_tt.dynamic.Constant(0.5), safe_check="ignore")
    >>> rows, _ = jax_tt.lookup(table, table.init(jax.random.key(0)), np.array([3]))
    >>> float(rows[0, 0])
    0.5
    """

    signed: ClassVar[bool] = False

    def quantile(self, probability: float) -> float:
        del probability
        return 1.0


def initial_rows(
    distribution: InitialRows, seed: jax.Array, keys: jax.Array, features: int
) -> jax.Array:
    """The initial rows of keys, float32 ``[n, features]``.

    The bits of an element are Threefry-2x32 under a key of the row, which is Threefry-2x32 of the key under the seed.
    Their highest one is the sign, the others the probability of being exceeded.

    Args:
        distribution: of every element.
        seed: uint32 ``[2]``.
        keys: uint32 ``[n, 2]``, the high word first.
        features: number of columns.
    """
    high, low = threefry(seed[0], seed[1], keys[:, 0], keys[:, 1])
    blocks = jnp.arange((features + 1) // 2, dtype=jnp.uint32)
    pair = threefry(high[:, None], low[:, None], blocks[None, :], jnp.uint32(0))
    bits = jnp.stack(pair, axis=2).reshape(keys.shape[0], 2 * blocks.size)[:, :features]
    rest = (bits << 1) | 1
    octave = jax.lax.clz(rest).astype(jnp.int32)
    rest = rest << octave.astype(jnp.uint32)
    place = octave * (SEGMENTS + 1) + ((rest >> 24) & (SEGMENTS - 1)).astype(jnp.int32)
    part = ((rest >> 8) & 0xFFFF).astype(jnp.int32)
    table = jnp.asarray(distribution.quantiles.reshape(-1))
    left, right = table[place], table[place + 1]
    whole = left + (((right - left) * part) >> 16)
    if distribution.signed:
        whole = jnp.where(bits >> 31 == 1, -whole, whole)
    return whole.astype(jnp.float32) * distribution.factor


def threefry(*words: Any) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of a counter of two words, the last two, under a key of two words."""
    words = tuple(jnp.asarray(word, jnp.uint32) for word in words)
    shape = jnp.broadcast_shapes(*(word.shape for word in words))
    first, second = threefry2x32_p.bind(*(jnp.broadcast_to(word, shape) for word in words))
    return first, second

"""64-bit totals as two words, in case 64-bit types are disabled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def added(words: jax.Array, more: jax.Array) -> jax.Array:
    """Totals, as low and high word ``[..., 2]``, plus uint32 ``more [...]``."""
    low, high = words[..., 0], words[..., 1]
    total = low + more
    carry = (total < low).astype(jnp.uint32)
    return jnp.stack([total, high + carry], axis=-1)


def integers(words: Any) -> np.ndarray:
    """Totals ``[..., 2]`` as uint64 ``[...]``, on the host."""
    low, high = np.moveaxis(np.asarray(words, np.uint64), -1, 0)
    return low + (high << np.uint64(32))

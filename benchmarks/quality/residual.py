"""Sums of TT tables with different orders of ids, which start from the rows of a trained table."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from benchmarks.quality.sizes import residual_shapes


def residual_tt(
    start: np.ndarray, *, ratio: float, dtype: str, optimizer: Any, rngs: nnx.Rngs
) -> jax_tt.TableEmbed:
    """TT tables of two cores whose rows are added; each starts from the remainder of given rows after those before it.

    Args:
        start: the rows [rows, features].
        ratio: float32 bytes of the rows over bytes of the cores and of the orders of ids, at least.
        dtype: storage type of the cores.
        optimizer: fused one of `jax_tt.optimizers`, or None.
        rngs: of the variables.
    """
    rows, features = start.shape
    shapes = residual_shapes(rows, features, ratio, dtype)
    terms = jax_tt.tt.residuals(start, shapes, dtype=dtype, progress=False)
    update = None if optimizer is None else jax_tt.Update(optimizer)
    table, state = jax_tt.compression.residual_table(terms, update=update)
    layer = jax_tt.TableEmbed(table, jax_tt.Lookup(bounds="warn", dtype=jnp.float32), rngs=rngs)
    for name, array in state.items():
        getattr(layer, name)[...] = array
    return layer

"""How exact the products of float32 tables must be on a GPU."""

from typing import Any

import jax
from jax import lax


def tensor_float32() -> bool:
    """Whether tensor cores may take float32 factors rounded to TF32 (10 bits of mantissa).

    Only where `jax.default_matmul_precision` asks for less than full precision. Unset means full: other than with a
    layer's activations, the error of a row would stay in the table.
    """
    name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    try:
        precision = lax.Precision(name) if name is not None else lax.Precision.HIGHEST
    except ValueError:  # names an algorithm of one dot product, of which none is asked here
        return False
    return precision != lax.Precision.HIGHEST

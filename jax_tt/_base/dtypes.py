"""The types and the precision of sums and products."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@functools.cache
def accumulator(*dtypes: Any) -> Any:
    """Type in which products of these types are accumulated: float32, or float64 if any is float64."""
    # Spelled out because jnp.promote_types refuses under strict dtype promotion.
    return jnp.dtype(
        jnp.float64 if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else jnp.float32
    )


def widest(left: Any, right: Any) -> Any:
    """Result type of an op on two floating types, the same under strict dtype promotion."""
    left, right = jnp.dtype(left), jnp.dtype(right)
    return left if left == right else accumulator(left, right)


def x64_enabled() -> bool:
    """Whether JAX keeps 64-bit types here, by configuration or by context."""
    return jax.dtypes.canonicalize_dtype(jnp.int64) == jnp.int64


# Algorithms of one product whose factors are no more exact than TF32.
_NO_MORE_THAN_TF32 = (lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.BF16_BF16_F32)
_HINT = (
    "expected None, 'default', 'high', 'highest' or another name that jax.default_matmul_precision takes, a "
    "jax.lax.Precision, a pair of either, a jax.lax.DotAlgorithmPreset or a jax.lax.DotAlgorithm"
)


def resolve_precision(precision: Any) -> Any:
    """A `jax.lax.Precision` or the algorithm of a product, resolved when an operation is called.

    None means `jax.default_matmul_precision`, and full precision if that is not set, on every device: unlike an error
    in the activations of a layer, the error of a row would stay in the table. Of a pair, one for each factor, the more
    precise one is used, because a factor of one product is the result of another.

    Raises:
        ValueError: ``precision`` is not accepted by JAX's products.
    """
    if precision is None:
        name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        return lax.Precision.HIGHEST if name is None else resolve_precision(name)
    if isinstance(precision, tuple) and len(precision) == 2:
        return max((_named(each, precision) for each in precision), key=lambda p: p.value)
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        precision = lax.DotAlgorithmPreset[precision]
    if precision is lax.DotAlgorithmPreset.DEFAULT:
        return lax.Precision.DEFAULT
    if isinstance(precision, lax.DotAlgorithmPreset | lax.DotAlgorithm):
        return precision
    return _named(precision, precision)


@functools.cache
def tensor_float32(precision: Any) -> bool:
    """Whether tensor cores may take float32 factors rounded to TF32 (10 bits of mantissa)."""
    if isinstance(precision, lax.Precision):
        return precision != lax.Precision.HIGHEST
    return precision in _NO_MORE_THAN_TF32


def _named(precision: Any, given: Any) -> lax.Precision:
    try:
        if isinstance(precision, str | lax.Precision):
            return lax.Precision(precision)
    except ValueError:
        pass
    raise ValueError(f"precision: got {given!r}; {_HINT}.")

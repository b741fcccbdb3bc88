"""Initial cores whose *table entries* follow a wanted distribution."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from jax_tt._dtypes import accumulator
from jax_tt._shape import TTShape

CoreInit = str | Callable[..., Any]

# Entries of a standard normal closer to zero than this are left out, so that products of several
# entries do not pile up at zero. At 2 their fourth moment is 1.1 squared variances: nearly a fair sign.
_CUT = 2.0
_TAIL = 0.5 * math.erfc(_CUT / math.sqrt(2.0))
_CUT_STD = math.sqrt(1.0 + _CUT * math.exp(-0.5 * _CUT**2) / math.sqrt(2.0 * math.pi) / _TAIL)


def init_cores(
    key: jax.Array, shape: TTShape, init: CoreInit = "approx-normal", dtype: Any = jnp.float32
) -> tuple[jax.Array, ...]:
    """Fresh cores of a tensor-train table.

    A table entry is a sum over rank paths of products of ``d`` core entries. Every named
    initialiser scales the cores so that this sum has mean 0 and variance ``1 / (3 N)``, for any d and ranks
    (``N = num_embeddings``):

    - ``"approx-normal"``: table entries N(0, 1/(3N)). All cores but the largest hold entries of nearly
      constant magnitude (a normal without its centre), the largest holds a normal, so the entries stay
      near-normal down to rank 1.
    - ``"approx-uniform"``: the same with a uniform largest core: U(-1/sqrt(N), 1/sqrt(N)) at rank 1. A sum over
      many rank paths tends to a normal of the same variance whatever is summed.
    - ``"normal"``, ``"uniform"``: plain core entries; products of few have heavy tails.

    Args:
        key: typed key, ``jax.random.key(seed)``.
        shape: the table's `TTShape`.
        init: a name above, or a callable ``(key, core_shape, dtype) -> core`` used for each core.
        dtype: storage type of the cores; sampling is in float32 or better.

    Returns:
        Tuple of ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.

    Raises:
        ValueError: unknown name, or a callable returned another shape.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> [core.shape for core in jax_tt.init_cores(jax.random.key(0), shape)]
    [(10, 1, 2, 4), (10, 4, 2, 4), (10, 4, 2, 1)]
    """
    keys = jax.random.split(key, shape.d)
    if callable(init):
        return tuple(_called(init, keys[k], core, dtype, k) for k, core in enumerate(shape.core_shapes))
    if init not in _SAMPLERS:
        raise ValueError(
            f"init: got {init!r}; expected one of {', '.join(map(repr, _SAMPLERS))}, or a callable "
            "(key, core_shape, dtype) -> core."
        )
    compute = accumulator(dtype)
    sizes = [math.prod(core) for core in shape.core_shapes]
    largest = sizes.index(max(sizes))
    rest, main = _SAMPLERS[init]
    scale = _core_std(shape)
    return tuple(
        ((main if k == largest else rest)(keys[k], core, compute) * scale).astype(dtype)
        for k, core in enumerate(shape.core_shapes)
    )


def _core_std(shape: TTShape) -> float:
    """Standard deviation of core entries that gives table entries the variance 1 / (3 N)."""
    # In logarithms: the product of five ranks and N may be beyond float range in one step.
    log_variance = -math.log(3.0 * shape.num_embeddings) - sum(map(math.log, shape.ranks))
    return math.exp(0.5 * log_variance / shape.d)


def _called(init: Callable[..., Any], key: jax.Array, core: tuple[int, ...], dtype: Any, k: int) -> Any:
    value = jnp.asarray(init(key, core, dtype))
    if value.shape != core:
        raise ValueError(f"init: returned shape {value.shape} for core {k}; expected {core}.")
    return value.astype(dtype)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bound = math.sqrt(3.0)
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _centreless(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Unit-variance normal conditioned on ``|x| > _CUT``, by inversion of its distribution."""
    # One uniform number on (-1, 1) gives both the sign and the position in the tail.
    u = jax.random.uniform(key, shape, dtype, -1.0, 1.0)
    tail = jnp.maximum(jnp.abs(u), jnp.finfo(dtype).tiny * 4) * _TAIL
    magnitude = -ndtri(jnp.maximum(tail, jnp.finfo(dtype).tiny))
    return jnp.where(u < 0, -magnitude, magnitude) / _CUT_STD


# name -> (sampler of the other cores, sampler of the largest core), all of unit variance
_SAMPLERS = {
    "approx-normal": (_centreless, _normal),
    "approx-uniform": (_centreless, _uniform),
    "normal": (_normal, _normal),
    "uniform": (_uniform, _uniform),
}

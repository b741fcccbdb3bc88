"""Initial cores whose *table entries* follow a given distribution."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfinv, ndtri

from jax_tt._base.arguments import as_dtype, as_number, instance_of, mismatch, one_of
from jax_tt._base.dtypes import accumulator
from jax_tt._tt.shape import TTShape


@dataclasses.dataclass(frozen=True)
class ScaledCores:
    """Cores of a named initialiser with which table entries have the standard deviation ``stddev``."""

    stddev: float
    init: str = "approx-normal"

    def __post_init__(self) -> None:
        expected = "a positive number, e.g. stddev=0.02, or None for the default"
        stddev = as_number("stddev", self.stddev, expected, lambda x: 0 < x < math.inf)
        object.__setattr__(self, "stddev", stddev)


CoreInit = str | ScaledCores | Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class GivenCores:
    """In place of an initialiser, the cores; ``fresh`` makes the slices of a table that grows."""

    cores: tuple[Any, ...]
    fresh: CoreInit


def with_stddev(init: CoreInit | GivenCores, stddev: float) -> CoreInit | GivenCores:
    """The initialiser with this standard deviation of table entries, if it is only a name so far."""
    if isinstance(init, GivenCores):
        return dataclasses.replace(init, fresh=with_stddev(init.fresh, stddev))
    return ScaledCores(stddev, init) if isinstance(init, str) else init


def scaled_init(init: Any, stddev: float | None) -> Any:
    """The initialiser with the standard deviation that the user has chosen, None for the default."""
    if stddev is None:
        return init
    scaled = with_stddev(init, stddev)
    if scaled is init:
        got = f"{stddev!r} with the initialiser {init!r}, which scales cores itself"
        raise mismatch("stddev", got, 'a named one, e.g. "approx-normal", or stddev=None')
    return scaled


def fresh_init(init: CoreInit | GivenCores) -> CoreInit:
    """What new slices are made by."""
    return init.fresh if isinstance(init, GivenCores) else init


# Entries of a standard normal closer to zero than this are left out, so that products of several
# entries do not pile up at zero. At 2 their fourth moment is 1.1 squared variances: nearly a fair sign.
_CUT = 2.0
_TAIL = 0.5 * math.erfc(_CUT / math.sqrt(2.0))
_CUT_STD = math.sqrt(1.0 + _CUT * math.exp(-0.5 * _CUT**2) / math.sqrt(2.0 * math.pi) / _TAIL)


def init_cores(
    key: jax.Array,
    shape: TTShape,
    init: CoreInit = "approx-normal",
    dtype: Any = jnp.float32,
    *,
    stddev: float | None = None,
) -> tuple[jax.Array, ...]:
    """Initialises the cores of a tensor-train table.

    A table entry is a sum of products of ``d`` core entries, over all paths through the ranks. Every named
    initialiser scales the cores such that this sum has mean 0 and the standard deviation ``stddev``, for every d and
    all ranks, measured on the entries that were drawn:

    - ``"approx-normal"``: normal table entries. All cores except the largest have entries of nearly
      constant magnitude (a normal distribution without its centre), and the largest is normal, so that table entries
      stay nearly normal down to rank 1.
    - ``"approx-uniform"``: the same with a uniform largest core, which is close to U(-1/sqrt(N), 1/sqrt(N)) at rank
      1 and the default ``stddev``. At higher ranks the sums tend to a normal distribution of the same variance.
    - ``"normal"``, ``"uniform"``: plain core entries; at low rank their products have heavy tails.

    Args:
        key: typed key, ``jax.random.key(seed)``.
        shape: the table's `TTShape`.
        init: one of the names above, or a callable ``(key, core_shape, dtype) -> core`` that is called for each core.
        dtype: storage type of the cores; sampling is in float32 or float64.
        stddev: standard deviation of the table entries with a named ``init``; default ``1 / sqrt(3 N)``.

    Returns:
        Tuple of ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.

    Raises:
        ValueError: unknown name, or a callable returned a wrong shape.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> [core.shape for core in jax_tt.tt.init(jax.random.key(0), shape)]
    [(10, 1, 2, 4), (10, 4, 2, 4), (10, 4, 2, 1)]
    """
    instance_of("shape", shape, TTShape, "a TTShape, e.g. TTShape.suggest(10**6, 64)")
    instance_of("key", key, jax.Array | np.ndarray, "a typed key, jax.random.key(seed)")
    dtype = as_dtype("dtype", dtype, jnp.float32)
    init = scaled_init(init, stddev)
    if callable(init):
        keys = jax.random.split(key, shape.d)
        return tuple(
            _called(init, keys[k], core, dtype, k) for k, core in enumerate(shape.core_shapes)
        )
    return _sample(key, shape, *_name_and_log_variance(init, shape), dtype)


def _name_and_log_variance(init: Any, shape: TTShape) -> tuple[str, float]:
    """The name of an initialiser, and the logarithm of the variance of table entries."""
    if isinstance(init, ScaledCores):
        name, log_variance = init.init, 2 * math.log(init.stddev)
    else:
        name, log_variance = init, -math.log(3.0 * shape.num_embeddings)
    one_of("init", name, tuple(_SAMPLERS), ", or a callable (key, core_shape, dtype) -> core")
    return name, log_variance


@partial(jax.jit, static_argnums=(1, 2, 4))
def _sample(
    key: jax.Array, shape: TTShape, init: str, log_variance: float, dtype: Any
) -> tuple[jax.Array, ...]:
    sizes = [math.prod(core) for core in shape.core_shapes]
    largest = sizes.index(max(sizes))
    rest, main = _SAMPLERS[init]
    # One draw for all cores compiles in a fraction of the time of one per core.
    draws = jax.random.uniform(key, (sum(sizes),), accumulator(dtype), -1.0, 1.0)
    ends = list(itertools.accumulate(sizes))
    raw = [
        (main if k == largest else rest)(draws[ends[k] - sizes[k] : ends[k]]).reshape(core)
        for k, core in enumerate(shape.core_shapes)
    ]
    # In logarithms: the product of five ranks and N may leave the range of floats in one step.
    log_target = log_variance - sum(map(math.log, shape.ranks))
    scale = jnp.exp((log_target - jnp.log(_mean_square(raw))) / (2 * shape.d))
    return tuple((core * scale).astype(dtype) for core in raw)


def init_slices(
    key: jax.Array, cores: Sequence[jax.Array], shape: TTShape, init: CoreInit
) -> jax.Array:
    """Fresh slices ``[count, 1, q_1, r_1]`` that extend the first of ``cores`` to the shape ``shape``.

    With a named initialiser the entries of the new rows have the variance of a fresh table, whatever the current
    values of the other cores.
    """
    added = (shape.row_factors[0] - cores[0].shape[0], *cores[0].shape[1:])
    if callable(init):
        return _called(init, key, added, cores[0].dtype, 0)
    name, log_variance = _name_and_log_variance(init, shape)
    wide = accumulator(cores[0].dtype)
    raw = _SAMPLERS[name][1](jax.random.uniform(key, added, wide, -1.0, 1.0))
    log_target = log_variance - sum(map(math.log, shape.ranks))
    others = [core.astype(wide) for core in cores[1:]]
    scale = jnp.exp((log_target - jnp.log(_mean_square([raw, *others]))) / 2)
    # Cores of zeros give no row a value, whatever the slices are.
    return (raw * jnp.where(jnp.isfinite(scale), scale, 1)).astype(cores[0].dtype)


def _mean_square(cores: Sequence[jax.Array]) -> jax.Array:
    """Mean square of all table entries divided by the number of rank paths, without the table.

    It is near 1 for cores of unit variance. Dividing by the actual value makes the variance of a small table as exact
    as that of a large one.
    """
    moment = jnp.ones((1, 1), cores[0].dtype)
    for core in cores:
        p, r, q, t = core.shape
        slices = core.transpose(0, 2, 1, 3).reshape(p * q, r, t)
        half = jnp.einsum("ab,mac->mbc", moment, slices)
        moment = jnp.einsum("mbc,mbd->cd", half, slices) / (p * q * r)
    return moment[0, 0]


def _called(
    init: Callable[..., Any], key: jax.Array, core: tuple[int, ...], dtype: Any, k: int
) -> Any:
    value = jnp.asarray(init(key, core, dtype))
    if value.shape != core:
        raise ValueError(f"init: returned shape {value.shape} for core {k}; expected {core}.")
    return value.astype(dtype)


# Samplers turn uniform numbers on (-1, 1) into numbers of unit variance.


def _uniform(u: jax.Array) -> jax.Array:
    return math.sqrt(3.0) * u


def _normal(u: jax.Array) -> jax.Array:
    # -1 is a possible draw and has no finite image.
    return math.sqrt(2.0) * erfinv(jnp.maximum(u, -1 + jnp.finfo(u.dtype).epsneg))


def _centreless(u: jax.Array) -> jax.Array:
    """A normal variable conditioned on ``|x| > _CUT``: ``u`` gives the sign and the position in the tail."""
    tail = jnp.maximum(jnp.abs(u), jnp.finfo(u.dtype).eps) * _TAIL
    magnitude = -ndtri(tail) / _CUT_STD
    return jnp.where(u < 0, -magnitude, magnitude)


# name -> (sampler of the other cores, sampler of the largest core), all of unit variance
_SAMPLERS = {
    "approx-normal": (_centreless, _normal),
    "approx-uniform": (_centreless, _uniform),
    "normal": (_normal, _normal),
    "uniform": (_uniform, _uniform),
}

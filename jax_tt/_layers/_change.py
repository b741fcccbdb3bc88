"""What becomes of all variables of a table that is reordered or grows, whichever flavour its layer is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tt._algebra.approximation import TTApproximation
from jax_tt._algebra.grow import tt_grow
from jax_tt._algebra.reorder import check_cores, reordered_rows
from jax_tt._algebra.train_rows import TrainRows
from jax_tt._cache.config import RowCache
from jax_tt._cache.resize import moved, resized
from jax_tt._init import CoreInit
from jax_tt._layers import _cached
from jax_tt._layers._names import core_names, fresh_state, fused_table, slot_name
from jax_tt._layers._options import check_id_order
from jax_tt._ops._table import SCALARS
from jax_tt._shape import TTShape
from jax_tt.optimizers import Optimizer
from jax_tt.order import IdOrder

# (state of one core before, fresh state of that core after) -> its state after
Carry = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table between steps.

    Attributes:
        shape: its `TTShape`.
        optimizer: rule of a fused table, or None.
        cache: `RowCache` or None.
        values: cores, optimizer state and cache by variable name.
        id_order: `IdOrder` or None.
    """

    shape: TTShape
    optimizer: Optimizer | None
    cache: RowCache | None
    values: Mapping[str, Any]
    id_order: IdOrder | None

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        return tuple(self.values[name] for name in core_names(self.shape.d))


def reordered(
    table: Table, id_order: IdOrder, options: Mapping[str, Any]
) -> tuple[Table, TTApproximation]:
    """The table under another order; cached rows enter the fit as they are, and the cache is empty afterwards."""
    if id_order is None:
        raise TypeError(
            "id_order: got None; expected a jax_tt.order.IdOrder, e.g. IdOrder.identity(num_embeddings) where ids are "
            "to be rows."
        )
    check_id_order(id_order, table.shape.num_embeddings)
    if "dtype" in options:
        raise TypeError(
            f"dtype: got {options['dtype']!r}; a layer keeps its param_dtype. Give the cores of tt_reorder to a "
            "layer of another one."
        )
    check_cores(table.cores)
    rows: Any = TrainRows(table.cores, table.shape)
    if table.cache is not None and table.cache.gradients == "rows":
        tags = np.asarray(table.values["cache_tags"]).reshape(-1)
        rows = _WithOwnRows(rows, tags, np.asarray(table.values[_cached.ROWS]))
    found = reordered_rows(rows, table.shape, table.id_order, id_order, **options)
    values = {
        name: value for name, value in table.values.items() if name not in _core_values(table)
    }
    values |= _with_state(table, found.cores, dict.fromkeys(core_names(found.shape.d), restarted))
    values |= _empty_cache(table, found.shape)
    return dataclasses.replace(table, shape=found.shape, values=values, id_order=id_order), found


def grown(
    table: Table, num_embeddings: int, key: jax.Array, init: CoreInit, like: Any, method: str
) -> tuple[Table, Carry]:
    """The table with more rows, and what becomes of the state of its cached rows.

    `Table.cores` but for the slices appended to the first are the same arrays.
    """
    old, shape = table.shape, table.shape.grow(num_embeddings)
    order = None if table.id_order is None else table.id_order.grow(num_embeddings)
    if like is not None:
        like = _rows_like(like, shape.num_embeddings - old.num_embeddings, table)
    carry: Carry = extended
    cache = table.cache
    if cache is not None and _cache_layout(cache, shape) != _cache_layout(cache, old):
        table, carry = _resized(table, cache, shape.num_embeddings, method)
    cores = tt_grow(table.cores, shape, key, init=init, like=like)
    values = _with_state(table, cores, {core_names(1)[0]: extended})
    values = {**table.values, **values}
    return dataclasses.replace(table, shape=shape, values=values, id_order=order), carry


def with_cache(table: Table, cache: RowCache, method: str) -> tuple[Table, Carry]:
    """The table with another cache in place of the one it has, and what becomes of the state of its cached rows."""
    if table.cache is None:
        raise ValueError(
            "cache: the layer has no row cache to resize; build it with cache=jax_tt.RowCache(capacity=...)."
        )
    _cached.check_cache(cache, table.shape.num_embeddings)
    if cache is None:
        raise TypeError(
            "cache: got None; expected a RowCache. flush() writes back what rows learned."
        )
    return _resized(table, cache, table.shape.num_embeddings, method)


def restarted(old: Any, fresh: Any) -> Any:
    """State of a core that was fitted anew: everywhere the mean of what it was.

    Entries of the new core have nothing to do with those of the old one, so that first moments, whose mean is nearly 0,
    are forgotten. The size of the gradients is about what it was. It keeps second moments from starting at 0 at a late
    step, which would make the first steps several times too long. State that starts at the parameters, as `z` of
    `optax.contrib.schedule_free` does, is made of the new ones.
    """
    if (fresh != fresh.reshape(-1)[0]).any():
        return fresh
    mean = jnp.mean(jnp.asarray(old), dtype=jnp.float32)
    return jnp.full_like(fresh, mean.astype(fresh.dtype))


def extended(old: Any, fresh: Any) -> Any:
    """State of a core with slices appended: theirs is fresh, that of the others is the same bit for bit."""
    if old.shape[1:] != fresh.shape[1:] or not old.ndim:
        return fresh
    return jnp.concatenate([jnp.asarray(old), fresh[old.shape[0] :]])


def other_cores(name: str, old: TTShape, new: TTShape) -> str:
    """Says why state of optax cannot follow a table to another number of cores."""
    return (
        f"{name}: got the state of a table of {old.d} cores, which would have {new.d}; expected as many, or "
        f"{name}=None and an optimizer that is made anew afterwards."
    )


def check_state(
    name: str, tx: optax.GradientTransformation, state: Any, params: Any, whose: str
) -> None:
    """Refuses state of optax that is not that of these parameters."""
    want = jax.eval_shape(tx.init, params)
    if jax.tree.map(jnp.shape, want) != jax.tree.map(jnp.shape, state):
        raise ValueError(
            f"{name}: holds state of other parameters than those of {whose}; expected what was made for these."
        )


def carried(
    tx: optax.GradientTransformation, state: Any, params: Any, carry: Callable[[Any], Carry | None]
) -> Any:
    """State of optax after cores of its parameters have changed.

    Args:
        tx: the transformation.
        state: its state so far.
        params: the parameters by now, with the structure that ``state`` was made for.
        carry: key path of a parameter -> what its state becomes, or None for one that has not changed.
    """

    def keep(old: Any, fresh: Any) -> Any:
        del fresh
        return old

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    rules = jax.tree_util.tree_map_with_path(lambda path, _: carry(path) or keep, params)
    # A transformation of some parameters only, as in `optax.multi_transform`, has such nodes for the others.
    by_leaf = optax.tree_utils.tree_map_params(
        tx,
        lambda old, rule: old if masked(old) else rule,
        state,
        rules,
        transform_non_params=lambda _: keep,
        is_leaf=masked,
    )
    return jax.tree.map(lambda rule, old, new: rule(old, new), by_leaf, state, tx.init(params))


class _WithOwnRows:
    """A table some of whose rows have values of their own: those that are cached."""

    def __init__(self, table: TrainRows, tags: np.ndarray, values: np.ndarray):
        self.shape, self.dtype = table.shape, table.dtype
        slots = np.argsort(tags)
        slots = slots[tags[slots] >= 0]
        self._table, self._rows, self._values = table, tags[slots], values[slots]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        found = self._table[rows]
        if len(self._rows):
            at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
            own = self._rows[at] == rows
            found[own] = self._values[at[own]]
        return found


def _with_state(
    table: Table, cores: tuple[jax.Array, ...], carry: Mapping[str, Carry]
) -> dict[str, Any]:
    """New cores and, where they are fused, their slots; the step goes on, so that schedules do."""
    names = core_names(len(cores))
    values: dict[str, Any] = dict(zip(names, cores, strict=True))
    if table.optimizer is None:
        return values
    fresh = fresh_state(table.optimizer, cores)
    for k, name in enumerate(names):
        for slot in (slot_name(slot.name, k) for slot in table.optimizer.slots):
            old = table.values.get(slot, fresh[slot])
            values[slot] = carry[name](old, fresh[slot]) if name in carry else old
    return values | {name: table.values[name] for name in SCALARS}


def _core_values(table: Table) -> set[str]:
    """Names of what there is once for every core."""
    slots = () if table.optimizer is None else table.optimizer.slots
    of_slots = {slot_name(slot.name, k) for slot in slots for k in range(table.shape.d)}
    return of_slots | {*core_names(table.shape.d)}


def _empty_cache(table: Table, shape: TTShape) -> dict[str, Any]:
    if table.cache is None:
        return {}
    dtype = table.cores[0].dtype
    directory, rows = _cached.fresh_cache(table.cache, shape, dtype, table.optimizer)
    kept = {name: table.values[name] for name in _cached.SCALARS if name in rows}
    return directory | rows | kept


def _resized(
    table: Table, cache: RowCache, num_embeddings: int, method: str
) -> tuple[Table, Carry]:
    assert table.cache is not None
    old = table.cache
    resize = partial(
        resized,
        old=old,
        new=cache,
        rows_to_come=num_embeddings,
        num_embeddings=table.shape.num_embeddings,
        optimizer=table.optimizer,
        method=method,
    )
    read = table.values.__getitem__
    new, slots = jax.jit(resize)(
        _cached.cached_table(old, table.optimizer, _whole_table(table), read)
    )
    values = {**table.values, **_cached.named_values(new, table.optimizer)}
    return dataclasses.replace(table, cache=cache, values=values), partial(moved, slots)


def _cache_layout(cache: RowCache, shape: TTShape) -> Any:
    return cache.layout(shape.num_embeddings), cache.key_dtype(shape.num_embeddings)


def _whole_table(table: Table) -> Any:
    if table.optimizer is None:
        return table.cores
    return fused_table(table.optimizer, table.cores, table.values.__getitem__)


def _rows_like(like: Any, count: int, table: Table) -> np.ndarray:
    """Rows of the ids that the new ids start near."""
    n = table.shape.num_embeddings
    ids = np.asarray(like)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (count,)):
        raise ValueError(
            f"like: got {ids.dtype} of shape {ids.shape}; expected an id, or one for each of the {count} new ids."
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise ValueError(
            f"like: got ids {int(ids.min())} to {int(ids.max())}; expected 0 to {n - 1}, those the table has."
        )
    return ids if table.id_order is None else table.id_order.apply(ids)

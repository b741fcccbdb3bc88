"""What becomes of all variables of a table that is reordered or grows, whichever flavour its layer is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tt._algebra.approximation import TTApproximation
from jax_tt._algebra.grow import tt_grow
from jax_tt._algebra.reorder import check_cores, reordered_rows
from jax_tt._algebra.train_rows import TrainRows
from jax_tt._cache.cached import ROWS, Cached, directory_of, outer_name
from jax_tt._cache.config import RowCache
from jax_tt._cache.resize import moved, resized
from jax_tt._flax._options import check_id_order, described_tt
from jax_tt._init import CoreInit, fresh_init
from jax_tt._shape import TTShape
from jax_tt._tables.table import SCALARS, Table, named
from jax_tt._tables.tensor_train import TTTable
from jax_tt.order import IdOrder

# (state of one core before, fresh state of that core after) -> its state after
Carry = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A table between steps.

    Attributes:
        table: its description.
        values: its state by name, but for the order of ids.
        id_order: `IdOrder` or None.
    """

    table: Table
    values: Mapping[str, Any]
    id_order: IdOrder | None

    @property
    def train(self) -> TTTable:
        return cast(TTTable, self.table.innermost)

    @property
    def shape(self) -> TTShape:
        return self.train.shape

    @property
    def cache(self) -> RowCache | None:
        return None if self.table.cached is None else self.table.cached.cache

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        return self.train.params(self.values)

    def changed(
        self,
        values: Mapping[str, Any],
        *,
        shape: TTShape | None = None,
        cache: RowCache | None = None,
        id_order: IdOrder | None = None,
    ) -> Layer:
        """The same with other values and sizes."""
        train = self.train
        shape = train.shape if shape is None else shape
        table = described_tt(
            shape,
            self.cache if cache is None else cache,
            self.id_order if id_order is None else id_order,
            param_dtype=train.param_dtype,
            update=train.update,
            name=train.name,
            core_init=fresh_init(train.core_init),
        )
        return Layer(table, values, self.id_order if id_order is None else id_order)


def reordered(
    layer: Layer, id_order: IdOrder, options: Mapping[str, Any]
) -> tuple[Layer, TTApproximation]:
    """The table under another order; cached rows enter the fit as they are, and the cache is empty afterwards."""
    if id_order is None:
        raise TypeError(
            "id_order: got None; expected a jax_tt.order.IdOrder, e.g. IdOrder.identity(num_embeddings) where ids are "
            "to be rows."
        )
    check_id_order(id_order, layer.shape.num_embeddings)
    if "dtype" in options:
        raise TypeError(
            f"dtype: got {options['dtype']!r}; a layer keeps its param_dtype. Give the cores of tt_reorder to a "
            "layer of another one."
        )
    check_cores(layer.cores)
    rows: Any = TrainRows(layer.cores, layer.shape)
    cached = layer.table.cached
    if cached is not None and cached.trains_rows:
        tags = np.asarray(directory_of(layer.values).tags).reshape(-1)
        rows = _WithOwnRows(rows, tags, np.asarray(layer.values[ROWS]))
    found = reordered_rows(rows, layer.shape, layer.id_order, id_order, **options)
    kept = {name: value for name, value in layer.values.items() if name not in _of_cores(layer)}
    after = layer.changed(kept, shape=found.shape, id_order=id_order)
    cores = named(after.train, found.cores)
    values = kept | _with_state(layer, after, cores, dict.fromkeys(cores, restarted))
    if cached is not None:
        empty = after.table.cached.init_cache(found.cores[0].dtype)
        steps = {outer_name(name) for name in SCALARS}
        values |= {name: values[name] if name in steps else value for name, value in empty.items()}
    return dataclasses.replace(after, values=values), found


def grown(
    layer: Layer, num_embeddings: int, key: jax.Array, init: CoreInit, like: Any, method: str
) -> tuple[Layer, Carry]:
    """The table with more rows, and what becomes of the state of its cached rows.

    `Layer.cores` but for the slices appended to the first are the same arrays.
    """
    old, shape = layer.shape, layer.shape.grow(num_embeddings)
    order = None if layer.id_order is None else layer.id_order.grow(num_embeddings)
    if like is not None:
        like = _rows_like(like, shape.num_embeddings - old.num_embeddings, layer)
    carry: Carry = extended
    cache = layer.cache
    if cache is not None and _cache_layout(cache, shape) != _cache_layout(cache, old):
        layer, carry = _resized(layer, cache, shape.num_embeddings, method)
    after = layer.changed(layer.values, shape=shape, id_order=order)
    cores = named(after.train, tt_grow(layer.cores, shape, key, init=init, like=like))
    values = _with_state(layer, after, cores, {next(iter(cores)): extended})
    return dataclasses.replace(after, values={**layer.values, **values}), carry


def with_cache(layer: Layer, cache: RowCache, method: str) -> tuple[Layer, Carry]:
    """The table with another cache in place of the one it has, and what becomes of the state of its cached rows."""
    if layer.cache is None:
        raise ValueError(
            "cache: the layer has no row cache to resize; build it with cache=jax_tt.RowCache(capacity=...)."
        )
    if cache is None:
        raise TypeError(
            "cache: got None; expected a RowCache. flush() writes back what rows learned."
        )
    Cached(layer.train, cache)
    return _resized(layer, cache, layer.shape.num_embeddings, method)


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
    before: Layer, after: Layer, cores: Mapping[str, Any], carry: Mapping[str, Carry]
) -> dict[str, Any]:
    """New cores and, where they are fused, their slots; the step goes on, so that schedules do."""
    fresh = after.train.init_rest(cores)
    values = dict(cores)
    for name, slots in zip(cores, after.train.slot_names, strict=True):
        for slot in slots:
            old = before.values.get(slot, fresh[slot])
            values[slot] = carry[name](old, fresh[slot]) if name in carry else old
    return values | {name: before.values[name] for name in SCALARS if name in fresh}


def _of_cores(layer: Layer) -> set[str]:
    """Names of what there is once for every core."""
    slots = (name for names in layer.train.slot_names for name in names)
    return {*layer.train.param_names, *slots}


def _resized(
    layer: Layer, cache: RowCache, num_embeddings: int, method: str
) -> tuple[Layer, Carry]:
    cached = layer.table.cached

    @jax.jit
    def changed(values: Mapping[str, Any]) -> tuple[dict[str, Any], jax.Array]:
        return resized(cached, values, cache, method, num_embeddings)

    values, slots = changed(dict(layer.values))
    return layer.changed(values, cache=cache), partial(moved, slots)


def _cache_layout(cache: RowCache, shape: TTShape) -> Any:
    return cache.layout(shape.num_embeddings), cache.key_dtype(shape.num_embeddings)


def _rows_like(like: Any, count: int, layer: Layer) -> np.ndarray:
    """Rows of the ids that the new ids start near."""
    n = layer.shape.num_embeddings
    ids = np.asarray(like)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (count,)):
        raise ValueError(
            f"like: got {ids.dtype} of shape {ids.shape}; expected an id, or one for each of the {count} new ids."
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        raise ValueError(
            f"like: got ids {int(ids.min())} to {int(ids.max())}; expected 0 to {n - 1}, those the table has."
        )
    return ids if layer.id_order is None else layer.id_order.apply(ids)

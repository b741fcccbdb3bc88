"""What is done to the table of an NNX layer between steps: its variables and their optax state follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_tt._base.arguments import concrete, expect, mismatch, type_of
from jax_tt._directories.hash_directory import KEYS
from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._ids.id_order import IdOrder
from jax_tt._kinds.cached.fill import fill
from jax_tt._kinds.cached.maintain import flush, populate, refresh, reset, statistics
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._kinds.hashed.change import grow_if_full
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._layers import change as _change
from jax_tt._layers.nnx.module import (
    TableModule,
    check_rngs,
    read_state,
    variable_type,
    write_state,
)
from jax_tt._layers.variables import IdOrderState
from jax_tt._ops.change_tables import grow_table, reorder_table
from jax_tt._ops.insert import insert_keys
from jax_tt._ops.inserting import Evicted, Inserted
from jax_tt._ops.remove import KeyView, remove_keys
from jax_tt._table.change import Carry, Change, maintain, with_cache
from jax_tt._table.copies import without_values
from jax_tt._table.state import State
from jax_tt._table.wrapper import find, innermost
from jax_tt._tt.approximation import Approximation
from jax_tt._tt.shape import TTShape


class ChangingModule(TableModule):
    """A layer whose table can be changed between steps: its row cache, its keys, its number and order of ids."""

    id_order: IdOrderState | None = None

    @property
    def tt_shape(self) -> TTShape:
        """Sizes of the tensor train."""
        return innermost(self.table).shape

    @property
    def cache(self) -> RowCache | None:
        """The row cache, or None."""
        cached = find(self.table, RowCachedTable)
        return None if cached is None else cached.cache

    def reorder(
        self,
        id_order: IdOrder,
        *,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
        **options: Any,
    ) -> Approximation:
        """Changes the order of ids in place; every id keeps its row up to the approximation error of the cores.

        `tt.reorder` computes the new cores, fitted to the cached values of cached rows; the cache is empty
        afterwards. Slots of a fused optimizer are reset to their mean over each core, and its step count is kept.
        Functions that were compiled for the layer are compiled again.

        Args:
            id_order: `IdOrder` of ``num_embeddings`` ids.
            opt: the optimizer of ``model`` if optax updates this table; its state of the table is reset in the same
                way, all other state is kept.
            model: the model that ``opt`` was created with; default this layer.
            **options: ``ranks``, ``shape``, ``tolerance`` and the other arguments of `tt.reorder` except ``dtype``;
                factors and ranks default to the present ones.

        Returns:
            `tt.Approximation`, with the error of the new rows.

        Raises:
            ValueError, TypeError: if an argument does not fit, in which case the layer is unchanged.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.TTEmbed(1000, 8, tt_ranks=4, rngs=nnx.Rngs(0))
            >>> before = layer(jnp.array([3, 5]))
            >>> order = jax_tt.order.from_table(layer(jnp.arange(1000)), layer.tt_shape)
            >>> approximation = layer.reorder(order, ranks=20)
            >>> change = jnp.linalg.norm(layer(jnp.array([3, 5])) - before)
            >>> bool(change < jnp.linalg.norm(before)), layer.tt_shape.ranks
            (True, (20, 20))
        """
        change = reorder_table(self.table, self._whole(), id_order, **options)
        self._become(change, opt, model)
        return change.approximation

    def grow(
        self,
        num_embeddings: int,
        *,
        like: Any = None,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Adds rows to the table in place; existing rows are unchanged, bit for bit.

        New rows of a dense table follow its ``embedding_init``, with fresh optimizer state. If necessary, the first row
        factor of a tensor train grows: slices from its ``core_init`` are appended to the first core, with fresh
        optimizer state. An order of ids is continued by the new ids in the new rows. Cached rows stay cached, and keep
        their slots unless the cache was larger than the table. See `tt.grow` for rows that the factors already covered.

        Args:
            num_embeddings: the new number of ids, at least the present one.
            like: one id, or one for every new id; the new rows start near the rows of these ids, or equal to them in a
                dense table.
            opt, model: as in `reorder`; state of new rows or slices is initialised, all other state is kept.
            rngs: random number generators; new rows take one key of ``params``.

        Raises:
            ValueError, TypeError: an argument does not fit, in which case the layer is unchanged.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.TTEmbed(1000, 8, tt_ranks=4, rngs=nnx.Rngs(0))
            >>> before = layer(jnp.arange(1000))
            >>> layer.grow(1200, rngs=nnx.Rngs(1))
            >>> bool(jnp.allclose(layer(jnp.arange(1000)), before)), layer(jnp.array([1199])).shape
            (True, (1, 8))

            A vocabulary to which new tokens are added, which start as a copy of token 0:

            >>> layer = jax_tt.Embed(1000, 8, rngs=nnx.Rngs(0))
            >>> layer.grow(1003, like=0, rngs=nnx.Rngs(1))
            >>> rows = layer(jnp.array([0, 1002]))
            >>> bool((rows[0] == rows[1]).all())
            True
        """
        check_rngs(rngs)
        state, key = self._whole(), rngs.params()
        change = grow_table(
            self.table, state, num_embeddings, key=key, like=like, method=self.lookup.method
        )
        self._become(change, opt, model)

    def resize_cache(
        self,
        cache: RowCache,
        *,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
    ) -> None:
        """Changes the capacity, ways, policy or counters of the row cache in place.

        The hottest rows are kept bit for bit, with their optimizer state; see `jax_tt.cache.resize`. To restore a
        checkpoint, build the layer with the cache that was saved, and resize it afterwards.

        Args:
            cache: the new `RowCache`, with the same ``gradients``.
            opt, model: as in `reorder`; the state of kept rows moves with them.

        Raises:
            ValueError, TypeError: an argument does not fit, in which case the layer is unchanged.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5), rngs=nnx.Rngs(0))
            >>> _ = layer(jnp.array([1, 2, 3]))
            >>> layer.populate()
            >>> layer.resize_cache(jax_tt.RowCache(100, ways=5))
            >>> layer.cache_rows.shape, layer.cache_statistics()["occupied"]
            ((100, 8), 3)
        """
        change = with_cache(self.table, self._whole(), cache, self.lookup.method)
        self._become(change, opt, model)

    def populate(self) -> None:
        """Replaces cold cached rows by hot rows that were counted; see `jax_tt.cache.populate`.

        Call it between steps, under ``jit`` or not, but not inside a loss. `FusedOptimizer.update` and
        `refresh_caches` do this automatically if the cache has a ``refresh_every``.

        Raises:
            ValueError: the layer has no cache.
        """
        self._apply(populate, self.lookup.method)

    def fill_cache(self, ids: Any, weights: Any = None) -> None:
        """Puts the most frequent rows of a sample of ids into the cache; see `jax_tt.cache.fill`.

        Call it before training or between steps, outside of ``jit``. Without ``refresh_every``, the cache then holds
        these rows until it is filled or populated again.

        Args:
            ids: a sample of requested ids, integers of any shape; negative ids are ignored.
            weights: what each id counts; default 1.

        Raises:
            ValueError, TypeError: the layer has no cache, or the sample does not fit.

        Example:
            >>> import jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5), rngs=nnx.Rngs(0))
            >>> layer.fill_cache([[3, 1, 4], [1, 5, 9]])
            >>> layer.cache_statistics()["occupied"]
            5
        """
        self._apply(fill, ids, weights, self.lookup.method)

    def refresh(self) -> None:
        """Calls `populate` if ``refresh_every`` batches have been counted since the last time."""
        self._apply(refresh, self.lookup.method)

    def flush(self) -> None:
        """Writes the cached rows back into the cores; see `jax_tt.cache.flush`."""
        self._apply(flush, self.lookup.method)

    def reset_cache(self) -> None:
        """Flushes the cache, then clears its rows, counts and statistics; see `jax_tt.cache.reset`."""
        self._apply(reset, self.lookup.method)

    def cache_statistics(self) -> dict[str, int | float]:
        """Statistics of the cache, read on the host; see `jax_tt.cache.statistics`."""
        return statistics(self.table, read_state(self))

    def insert(
        self,
        ids: Any,
        *,
        scores: Any = None,
        epoch: Any = None,
        return_evicted: bool = False,
    ) -> Inserted:
        """Finds or inserts the keys of a batch; see `jax_tt.dynamic.insert`.

        A training call does so by itself. Call this before it, outside of the loss, for what `Inserted` tells, or for
        scores and epochs, and look up `jax_tt.dynamic.with_slots` of the ids. The arguments are as in
        `jax_tt.dynamic.insert`.

        Raises:
            TypeError: the table of the layer has no keys.
        """
        options = {"scores": scores, "epoch": epoch, "return_evicted": return_evicted}
        options |= {"bounds": self.lookup.bounds}
        return self._change_keys(insert_keys, "insert", ids, **options)

    def remove(
        self,
        keys: Any = None,
        *,
        where: Callable[[KeyView], Any] | None = None,
        size: int | None = None,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
    ) -> Evicted:
        """Takes keys out of the table; see `jax_tt.dynamic.remove`, also for the other arguments.

        Args:
            opt, model: as in `jax_tt.TTEmbed.grow`, where optax steps the table; its state in the slots of the keys is
                initialised. Without ``opt`` this is an error then, except after ``eval()``.
        """
        self._require_keys("remove")
        table = unsharded_hash_table(self.table)
        steps = table.update is None and not (self.deterministic or table.frozen)
        if opt is None and steps and table.table.spec.row_names:
            label, got = (
                f"{type(self).__name__}.remove: opt",
                "None for a table without a fused rule",
            )
            expected = (
                "the optimizer of the model, as new keys would get the moments of those that leave"
            )
            fix = "Call layer.eval() before, if nothing trains the table."
            raise mismatch(label, got, expected, fix, TypeError)
        # Checked before the keys are removed, and written after.
        carry = dict.fromkeys(
            table.table.spec.row_names, lambda old, fresh: _initial_where(emptied, old, fresh)
        )
        write_moments = _moments(self, opt, model, carry)
        occupied = read_state(self)[KEYS[2]] > 0
        gone = self._change_keys(remove_keys, "remove", keys, where=where, size=size)
        emptied = occupied & (read_state(self)[KEYS[2]] == 0)
        write_moments()
        return gone

    def grow_if_full(
        self,
        *,
        max_load: float = 0.75,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
    ) -> bool:
        """Doubles the capacity where the load exceeds ``max_load``; see `jax_tt.dynamic.grow_if_full`.

        Args:
            max_load: the share of occupied slots above which the table grows.
            opt, model: as in `jax_tt.TTEmbed.grow`.

        Returns:
            Whether the table has grown.
        """
        self._require_keys("grow_if_full")
        options = {"max_load": max_load, "method": self.lookup.method}
        change = grow_if_full(self.table, read_state(self), **options)
        if change.table is self.table:
            return False
        self._become(change, opt, model)
        return True

    def _apply(self, function: Callable[..., State], *options: Any) -> None:
        """Sets the variables to the state that a function of the table and its state returns."""
        state = read_state(self)
        write_state(self, state, function(self.table, state, *options))

    def _require_keys(self, method: str) -> None:
        unsharded_hash_table(self.table, f"{type(self).__name__}.{method}: ")

    def _change_keys(
        self, function: Callable[..., Any], name: str, keys: Any, **options: Any
    ) -> Any:
        self._require_keys(name)
        before, method = read_state(self), self.lookup.method
        result, after = function(self.table, before, keys, method=method, **options)
        write_state(self, before, after)
        return result

    def _whole(self) -> dict[str, jax.Array]:
        values = read_state(self)
        concrete("layer", values, "It is reordered or grows between steps, outside of jit.")
        return values

    def _become(
        self, change: Change, opt: nnx.Optimizer[Any] | None, model: nnx.Module | None
    ) -> None:
        """Applies the change to the variables and to the optax state."""
        if opt is not None and self.optimizer is None:
            _change.check_cores("opt", self.table, change.table)
        moments = _moments(self, opt, model, change.carry)
        # This may fail, so it comes first: the new length of an axis may not be divisible by its devices.
        values = {
            name: _beside(getattr(self, name, None), value) for name, value in change.state.items()
        }
        for name in read_state(self).keys() - values.keys():
            delattr(self, name)
        template: nnx.Variable[Any] = getattr(self, self.table.spec.param_names[0])
        for name, value in values.items():
            variable = getattr(self, name, None)
            if variable is not None:
                variable.set_value(value)
                continue
            kind = variable_type(change.table, name)
            like = {} if name in change.table.spec.buffers else template.get_metadata()
            setattr(self, name, nnx.data(kind(value, **like)))
        self.table = without_values(change.table)
        self._describe()
        moments()


def check_moments(
    layer: ChangingModule, opt: nnx.Optimizer[Any] | None, model: nnx.Module | None
) -> None:
    """Raises unless `become` can change the optax state of ``model`` along with this layer."""
    _moments(layer, opt, model, {})


def become(
    layer: ChangingModule, change: Change, opt: nnx.Optimizer[Any] | None, model: nnx.Module | None
) -> None:
    """Applies a change of its table to a layer, and to the optax state of ``model``."""
    layer._become(change, opt, model)


def refresh_caches(model: Any) -> None:
    """Refreshes every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. `FusedOptimizer.update` does this automatically.

    Args:
        model: an NNX module; for linen use `jax_tt.linen.refresh_caches`.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> cache = jax_tt.RowCache(50, ways=5, refresh_every=2)
        >>> layer = jax_tt.TTEmbed(1000, 8, cache=cache, rngs=nnx.Rngs(0))
        >>> for step in range(2):
        ...     _ = layer(jnp.array([1, 2, 3]))
        ...     jax_tt.refresh_caches(layer)
        >>> layer.cache_statistics()["occupied"]
        3
    """
    modules = [module for _, module in nnx.iter_modules(model)]
    if not modules:
        fix = "The caches of a linen model are refreshed by jax_tt.linen.refresh_caches(model, variables, *inputs)."
        raise mismatch("model", type_of(model), "an NNX module", fix, error=TypeError)
    for module in modules:
        if isinstance(module, ChangingModule):
            module._apply(maintain, module.lookup.method)


def _initial_where(emptied: jax.Array, old: Any, fresh: Any) -> Any:
    """Optimizer state of rows, which is initial where slots ``[sets, ways]`` were emptied."""
    if old.shape[:1] != (emptied.size,):
        return old

    def chosen(arrays: Any) -> jax.Array:
        slots, old, fresh = arrays
        return jnp.where(slots.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

    return over_explicit_axes(chosen, (emptied, old, fresh), lambda: spec_of(old))


def _beside(variable: nnx.Variable[Any] | None, value: jax.Array) -> jax.Array:
    """The value with the sharding of the variable."""
    if variable is None or not variable[...].committed:
        return value
    return jax.device_put(value, variable[...].sharding)


def _moments(
    layer: nnx.Module,
    opt: nnx.Optimizer[Any] | None,
    model: nnx.Module | None,
    carry: Mapping[str, Carry],
) -> Any:
    """Checks the optax state and returns a function that updates it after the layer has changed."""
    if opt is None:
        return lambda: None
    model = layer if model is None else model
    paths = [path for path, module in nnx.iter_modules(model) if module is layer]
    expect(paths, "model", "a module without this layer", "the one that opt was made for")

    def params() -> Any:
        return nnx.as_pure(nnx.state(model, opt.wrt, graph=opt.graph))

    state = nnx.as_pure(opt.opt_state)
    _change.check_state("opt", opt.tx, state, params(), "model")

    def rule_of(path: Any) -> Carry | None:
        *names, name = [getattr(key, "key", None) for key in path]
        return carry.get(str(name)) if tuple(names) == paths[0] else None

    def apply() -> None:
        after = _change.carried(opt.tx, state, params(), rule_of)
        nnx.update(opt.opt_state, nnx.state(after, graph=opt.graph))

    return apply

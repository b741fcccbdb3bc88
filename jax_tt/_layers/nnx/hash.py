"""Hash tables in NNX: insertion, removal and growth between lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from flax import nnx

from jax_tt._kinds.hashed.change import grow_if_full
from jax_tt._kinds.hashed.table import HashTable, require_hash_table
from jax_tt._layers.nnx.change import ChangingModule
from jax_tt._layers.nnx.module import read_state, write_state
from jax_tt._ops.insert import insert_keys
from jax_tt._ops.inserting import Evicted, Inserted
from jax_tt._ops.remove import KeyView, remove_keys


class HashedModule(ChangingModule):
    """A layer that may have a `HashTable`."""

    def insert(
        self,
        ids: Any,
        *,
        scores: Any = None,
        epoch: Any = None,
        return_evicted: bool = False,
    ) -> Inserted:
        """Finds or inserts the keys of a batch; see `jax_tt.dynamic.insert`.

        Call it before the lookup of the batch, outside of the loss.

        Args:
            ids, scores, epoch, return_evicted: as in `jax_tt.dynamic.insert`.

        Raises:
            TypeError: the layer has no hash table.
        """
        table, before = require_hash_table(self.table), read_state(self)
        inserted, state = insert_keys(
            table,
            before,
            ids,
            scores=scores,
            epoch=epoch,
            method=self.lookup.method,
            return_evicted=return_evicted,
        )
        write_state(self, before, state)
        return inserted

    def remove(
        self,
        keys: Any = None,
        *,
        where: Callable[[KeyView], Any] | None = None,
        size: int | None = None,
    ) -> Evicted:
        """Takes keys out of the table; see `jax_tt.dynamic.remove`.

        Args:
            keys, where, size: as in `jax_tt.dynamic.remove`.
        """
        table, before = require_hash_table(self.table), read_state(self)
        evicted, state = remove_keys(
            table, before, keys, where=where, size=size, method=self.lookup.method
        )
        write_state(self, before, state)
        return evicted

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
        table, method = cast(HashTable, self.table), self.lookup.method
        change = grow_if_full(table, read_state(self), max_load=max_load, method=method)
        if change.table is self.table:
            return False
        self._become(change, opt, model)
        return True

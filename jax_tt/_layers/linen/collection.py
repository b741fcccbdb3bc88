"""`EmbedCollection` for linen."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh

from jax_tt._base.arguments import mismatch
from jax_tt._base.keywords import ChecksKeywords, no_such
from jax_tt._collection.by_table import Layout, parts_of_stacks
from jax_tt._collection.collection import Collection
from jax_tt._collection.feature import Feature
from jax_tt._collection.frozen import Frozen
from jax_tt._collection.lookup_features import check_lookup
from jax_tt._collection.states import UPDATES
from jax_tt._collection.statistics import STATISTICS, TOTALS, init_totals
from jax_tt._collection.training_state import Described, tables_of
from jax_tt._ids.placement import Placement
from jax_tt._kinds.hashed.table import COLLECTION as HASH_TABLE
from jax_tt._kinds.sharded.options import Exchange
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._layers.call import FeatureCalls
from jax_tt._layers.linen.table import TableEmbed, fused_variable
from jax_tt._lookup.shared import init_shared
from jax_tt._planning.shard_tables import over_mesh
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.copies import with_name, with_update, without_values
from jax_tt._table.options import DEFAULT_LOOKUP, Lookup
from jax_tt._table.table import Table


class CollectedTable(TableEmbed):
    """A table of an `EmbedCollection`, which has its step count and the flags that tables share."""

    @nn.nowrap
    def _scaled(self, table: Table) -> Table:
        return table


class EmbedCollection(ChecksKeywords, FeatureCalls, nn.Module):
    """Many tables of any kinds, looked up by feature in one call; see `jax_tt.EmbedCollection`.

    Every table is a submodule of the name that it has in ``tables``. Its variables have the names and are in the
    collections that they have in a layer of that table alone, except that all tables with an optimizer share a
    sentinel, a flag ``used`` and one array of step counts, which are variables of this module. Calls of ``apply`` with
    a mutable collection ``statistics`` count there what they look up; `jax_tt.Collection.statistics` reads it.

    Attributes:
        tables, features, lookup, mesh, axis, placement, exchange: as in `jax_tt.EmbedCollection`.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt.linen
        >>> embed = jax_tt.linen.EmbedCollection(
        ...     {"user": jax_tt.dense_table(1000, 16), "ad": jax_tt.dense_table(50, 8)},
        ...     {"user_id": jax_tt.Feature("user"), "shown": jax_tt.Feature("ad")},
        ... )
        >>> batch = {"user_id": jnp.array([[7], [8]]), "shown": jnp.array([[4, 5], [6, 7]])}
        >>> variables = embed.init(jax.random.key(0), batch)
        >>> embed.apply(variables, batch, method="concatenated").shape
        (2, 24)
        >>> sorted(variables["params"])
        ['ad', 'user']
    """

    tables: Mapping[str, Table]
    features: Mapping[str, Feature]
    lookup: Lookup = DEFAULT_LOOKUP
    mesh: Mesh | None = None
    axis: str | tuple[str, ...] | None = None
    placement: Placement | Mapping[str, Placement] | str | None = None
    exchange: Exchange | Mapping[str, Exchange] | None = None

    def __post_init__(self) -> None:
        for name in ("tables", "features", "placement", "exchange"):
            if isinstance(given := getattr(self, name), Mapping):
                # The module is hashable then, as a static argument has to be.
                setattr(self, name, Frozen(given))
        super().__post_init__()

    @property
    def host_batch(self) -> Callable[..., Any]:
        """Prepares the batch of a data loader for a step, as `jax_tt.EmbedCollection.host_batch`.

        It needs no variables, and is called on the module itself: ``embed.host_batch(batch)``.
        """
        collection = self._described()
        tables = {name: without_values(table) for name, table in collection.tables.items()}
        described = dataclasses.replace(collection, tables=tables)
        return partial(described.host_batch, bounds=self.lookup.bounds)

    @nn.nowrap
    def _described(self) -> Collection:
        tables = over_mesh(self.tables, self.mesh, self.axis, self.placement, self.exchange)
        return Collection(tables, self.features, stack=False)

    @nn.nowrap
    def _rebuilt(self, before: Collection, after: Collection) -> EmbedCollection:
        """The layer of a collection some of whose tables have changed between steps."""
        tables = {
            name: table
            if after.tables[name] == before.tables[name]
            else _unshared(after.tables[name], table.name)
            for name, table in self.tables.items()
        }
        layer = self.clone(tables=tables)
        of_mesh, sharded = (
            [isinstance(table, ShardedTable) for table in collection.tables.values()]
            for collection in (layer._described(), after)
        )
        if of_mesh == sharded:
            return layer
        if any(sharded):
            got = "a collection of which some tables alone are divided over the mesh of the layer"
            raise mismatch("fn()", got, "all, or none, as those of Collection.frozen(state)")
        return layer.clone(mesh=None, axis=None, placement=None, exchange=None)

    def setup(self) -> None:
        check_lookup(self.lookup)
        self.collection = self._described()
        self.parts = {
            name: CollectedTable(table, self.lookup, name=name)
            for name, table in self.collection.tables.items()
        }
        self.updates = self._declare_shared()

    # Flax wraps only the methods that stand in the class itself.
    __call__ = FeatureCalls.__call__
    concatenated = FeatureCalls.concatenated
    stacked = FeatureCalls.stacked

    def attend(self, table: str, query: jax.Array) -> jax.Array:
        """Scores ``query[..., D]`` against every row of a table, as `jax_tt.TTEmbed.attend`."""
        return self._part(table).attend(query)

    def top_k(self, table: str, queries: jax.Array, k: int, **options: Any) -> Any:
        """The best ``k`` rows of a table for each query; ``options`` are those of `jax_tt.TableEmbed.top_k`."""
        return self._part(table).top_k(queries, k, **options)

    @nn.nowrap
    def _part(self, table: str) -> CollectedTable:
        if table not in self.parts:
            raise ValueError(no_such("table", table, self.parts))
        return self.parts[table]

    @property
    def _inserts(self) -> bool:
        return self.is_mutable_collection(HASH_TABLE)

    _parts = property(operator.attrgetter("parts"))

    @nn.nowrap
    def _shared(self, lookups: Mapping[str, Lookup]) -> dict[str, dict[str, Any]]:
        """What a state has beside the tables."""
        counts = self.lookup.train and not self.is_initializing()
        if not counts or not self.is_mutable_collection(STATISTICS):
            return self.updates
        totals = self.get_variable(STATISTICS, TOTALS, init_totals(lookups))
        return {**self.updates, STATISTICS: {TOTALS: totals}}

    @nn.nowrap
    def _count(self, totals: Any) -> None:
        self.put_variable(STATISTICS, TOTALS, totals)

    @nn.nowrap
    def _declare_shared(self) -> dict[str, dict[str, Any]]:
        """What a state has of the scalars that tables share."""
        if not self.collection.sharing:
            return {}
        first = init_shared(len(self.collection.sharing))
        return {
            UPDATES: {
                name: fused_variable(self, name, lambda name=name: first[name]) for name in first
            }
        }


def _unshared(table: Table, name: str | None) -> Table:
    """A table of a collection as the layer describes it."""
    update = table.update and dataclasses.replace(table.update, shared=False)
    return with_name(with_update(unsharded(table), update), name)


@tables_of.register(EmbedCollection)
def _(model: EmbedCollection) -> Described:
    described = model._described()
    return tables_of(described)._replace(layout=Layout(parts_of_stacks(described)))

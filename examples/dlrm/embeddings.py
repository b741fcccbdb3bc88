"""The embedding layers of both models: ids of all categorical features to one vector of each."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt


class Place(NamedTuple):
    """Where the vectors of a categorical feature come from.

    Attributes:
      table: name of a table.
      first: row of the feature's id 0; features that share a table lie one after the other.
      hot: number of ids in an example, whose rows are summed.
    """

    table: str
    first: int
    hot: int


class CollectedTables(nnx.Module):
    """Tables of any kinds, looked up in one call.

    Args:
      tables: by name; all narrower ones have the same width K.
      places: of every feature, in the order of the columns of ids.
      features: D, the width of the vectors. One matrix [K, D] widens the sums of rows of all narrower tables.
      frozen_caches: row caches are filled by `fill_caches` alone; training does not count ids.
    """

    def __init__(
        self,
        tables: Mapping[str, jax_tt.Table],
        places: Sequence[Place],
        features: int,
        *,
        frozen_caches: bool,
        rngs: nnx.Rngs,
    ):
        self.places = tuple(places)
        self.frozen_caches = frozen_caches
        widths = [tables[place.table].features for place in places]
        # Those of narrow tables come last, so that their columns lie side by side.
        order = sorted(range(len(places)), key=lambda t: widths[t] < features)
        described = {
            _name(t): jax_tt.Feature(places[t].table, combiner="sum" if places[t].hot > 1 else None)
            for t in order
        }
        self.collection = jax_tt.EmbedCollection(tables, described, rngs=rngs)
        self.wide_columns = features * widths.count(features)
        width = min(widths)
        self.widening = (
            nnx.Linear(width, features, use_bias=False, rngs=rngs) if width < features else None
        )
        self._count(not frozen_caches)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Vectors [B, T, D] from ids [B, L], those of narrow tables last."""
        if self.widening is None:
            return self.collection.stacked(self._batch(ids))
        columns = self.collection.concatenated(self._batch(ids))
        wide, narrow = jnp.split(columns, [self.wide_columns], axis=1)
        samples, (width, features) = len(columns), self.widening.kernel.shape
        # As a matrix: XLA takes longer on a CPU for a product with an axis of features.
        widened = self.widening(narrow.reshape(-1, width)).reshape(samples, -1)
        return jnp.concatenate([wide, widened], axis=1).reshape(samples, -1, features)

    def fill_caches(self, sample: np.ndarray) -> None:
        """Gives the most frequent rows of a sample of ids [n, L] to the row caches.

        An id of a bag counts in inverse proportion to the size of the bag: sums of many rows follow each of them less.
        """
        for name, table in self._cached().items():
            columns = zip(_by_feature(sample, self.places), self.places, strict=True)
            mine = [(ids, place.hot) for ids, place in columns if place.table == name]
            weights = [np.full(ids.size, 1 / hot) for ids, hot in mine]
            table.fill_cache(
                np.concatenate([ids.reshape(-1) for ids, _ in mine]), np.concatenate(weights)
            )

    def hit_rate(self, ids: np.ndarray) -> float | None:
        """Share of the lookups in tables with a row cache that are hits; None without a cache.

        Counts the ids [n, L] in the caches.
        """
        before = self._statistics()
        self._count(True)
        _look_up(self.collection, self._batch(ids))
        self._count(not self.frozen_caches)
        requested, misses = (after - b for after, b in zip(self._statistics(), before, strict=True))
        return 1 - misses / requested if requested else None

    def _batch(self, ids: Any) -> dict[str, Any]:
        return {_name(t): rows for t, rows in enumerate(_by_feature(ids, self.places))}

    def _cached(self) -> dict[str, Any]:
        tables = self.collection.tables.items()
        return {name: table for name, table in tables if table.cache is not None}

    def _statistics(self) -> tuple[int, int]:
        """Requests and misses of all caches so far."""
        figures = [table.cache_statistics() for table in self._cached().values()]
        return sum(f["requested"] for f in figures), sum(f["misses"] for f in figures)

    def _count(self, count: bool) -> None:
        """Whether lookups are counted in the caches."""
        for table in self._cached().values():
            table.train() if count else table.eval()


@nnx.jit
def _look_up(collection: jax_tt.EmbedCollection, rows: Mapping[str, jax.Array]) -> None:
    """Counts the rows in the caches; nothing else is computed, since the vectors are not used."""
    collection(rows)


class FlaxTables(nnx.Module):
    """Dense tables as Flax has them, one per feature."""

    def __init__(self, tables: Sequence[nnx.Embed], places: Sequence[Place]):
        self.tables = nnx.List(tables)
        self.places = tuple(places)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Vectors [B, T, D] from ids [B, L]."""
        columns = zip(self.tables, _by_feature(ids, self.places), strict=True)
        return jnp.stack(
            [table(rows) if rows.ndim == 1 else table(rows).sum(1) for table, rows in columns],
            axis=1,
        )


def _name(t: int) -> str:
    return f"feature_{t}"


def _by_feature(ids, places: Sequence[Place]) -> Iterator:
    """The rows of every feature: [B], or [B, hot] of several ids."""
    ends = itertools.accumulate(place.hot for place in places)
    for place, end in zip(places, ends, strict=True):
        column = ids[:, end - 1] if place.hot == 1 else ids[:, end - place.hot : end]
        yield column + place.first if place.first else column

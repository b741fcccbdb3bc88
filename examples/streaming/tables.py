"""The tables of each variant, as large as the budget allows.

The bytes on the device are those of rows, optimizer state and directories of keys, and, with tiers, of the rows that
are on their way. Users and items have half of them each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jax_tt
from examples.retrieval.model import scaled_init
from examples.streaming.settings import Config

NAMES = ("user", "item")
WAYS = 16
# A key, its score and its last batch: what a slot of a directory takes.
_DIRECTORY_BYTES = 20
# What a table has beside its rows and slots: a clock, a seed, totals, counts of steps.
_REST = 256


def make(config: Config) -> jax_tt.Collection:
    """The tables on the device."""
    tables = {name: _MAKERS[config.variant](config) for name in NAMES}
    features = {name: jax_tt.Feature(name, combiner=None) for name in NAMES}
    return jax_tt.Collection(tables, features)


def make_tiers(config: Config, collection: jax_tt.Collection, path: Any) -> jax_tt.Tiers:
    """What continues the tables in host memory and on disk."""
    tier = jax_tt.Tier(
        host_rows=host_rows(config, collection),
        ways=WAYS,
        seed=config.seed,
        initializer=jax_tt.dynamic.Normal(config.init_std),
    )
    return jax_tt.Tiers(collection, dict.fromkeys(NAMES, tier), path=path, depth=config.depth)


def host_rows(config: Config, collection: jax_tt.Collection) -> int:
    """Rows of each table in host memory."""
    return max(WAYS, _in_sets(int(config.host_share * collection.tables[NAMES[0]].num_embeddings)))


def of_size(table: Any, state: Mapping[str, Any]) -> jax_tt.Table:
    """A hash table that has grown, from its arrays; others as they are."""
    if not isinstance(table.table, jax_tt.tables.DenseTable):
        return table
    rows = state["embedding"].shape[0]
    return dataclasses.replace(table, table=dataclasses.replace(table.table, num_embeddings=rows))


def device_bytes(state: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by part: rows, optimizer state, directory."""
    parts = {"rows": 0, "optimizer": 0, "directory": 0}
    for own in state.values():
        for name, array in own.items():
            part = "directory" if name.startswith("hash_") else "rows"
            parts["optimizer" if name.startswith("slot_") else part] += array.nbytes
    return parts


def in_flight_bytes(config: Config) -> int:
    """The rows that a batch exchanges: those that come, and those that leave until they are in host memory."""
    rows = 1 << (config.batch_size - 1).bit_length()
    return len(NAMES) * rows * _row_bytes(config) * (config.depth + 2)


def _hashing(config: Config) -> jax_tt.Table:
    return _dense(config, _rows(config, _row_bytes(config)))


def _tiers(config: Config) -> jax_tt.Table:
    return _dense(config, _rows(config, _row_bytes(config), in_flight_bytes(config)))


def _dense(config: Config, rows: int) -> jax_tt.Table:
    return jax_tt.dense_table(
        rows,
        config.features,
        optimizer=_rule(config),
        embedding_init=jax.nn.initializers.normal(config.init_std),
    )


def _dynamic(config: Config) -> jax_tt.Table:
    return _hashed(config, _rows(config, _row_bytes(config) + _DIRECTORY_BYTES))


def _unlimited(config: Config) -> jax_tt.Table:
    """It grows in training."""
    return _hashed(config, 1 << 13, policy="none", max_capacity=1 << 30, safe_check="error")


def _hashed(config: Config, capacity: int, **options: Any) -> jax_tt.Table:
    return jax_tt.hash_table(
        capacity,
        config.features,
        ways=WAYS,
        seed=config.seed,
        initializer=jax_tt.dynamic.Normal(config.init_std),
        optimizer=_rule(config),
        **options,
    )


def _tt(config: Config) -> jax_tt.Table:
    # Half of the bytes for the directory, half for the tensor train.
    half = (config.budget // len(NAMES) - _REST) // 2
    slots = max(WAYS, _in_sets(half // _DIRECTORY_BYTES))
    # The optimizer's state is a number for each slice of a core, less than 1 / 16 of the cores.
    shape = jax_tt.TTShape.for_budget(slots, config.features, max_bytes=half * 15 // 16)
    table = jax_tt.tt_table(
        **shape.layer_arguments(),
        core_init=scaled_init(shape, config.init_std),
        optimizer=_rule(config),
    )
    return jax_tt.tables.HashTable(table, ways=WAYS, seed=config.seed)


def _rule(config: Config) -> Any:
    return jax_tt.optimizers.RowWiseAdagrad(config.learning_rate)


def _row_bytes(config: Config) -> int:
    """A row and its optimizer state."""
    return 4 * config.features + 4


def _rows(config: Config, each: int, reserved: int = 0) -> int:
    rows = ((config.budget - reserved) // len(NAMES) - _REST) // each
    if rows < WAYS:
        raise ValueError(
            f"budget: got {config.budget:,} bytes; expected room for at least {WAYS} rows of {each} bytes for users "
            f"and for items, and {reserved:,} bytes for rows on their way."
        )
    return _in_sets(rows)


def _in_sets(rows: int) -> int:
    return rows // WAYS * WAYS


_MAKERS: dict[str, Callable[[Config], jax_tt.Table]] = {
    "hashing": _hashing,
    "dynamic": _dynamic,
    "tiers": _tiers,
    "tt": _tt,
    "unlimited": _unlimited,
}

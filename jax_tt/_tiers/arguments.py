"""The arguments of `Tiers`, which several processes must give alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_tt._base.arguments import instance_of, mismatch
from jax_tt._base.keywords import expect_names
from jax_tt._collection.collection import Collection
from jax_tt._table.table import Table
from jax_tt._tiers.processes import Processes
from jax_tt._tiers.row_bytes import RecordLayout
from jax_tt._tiers.table import Tier


def checked(collection: Any, tiers: Any) -> dict[str, Table]:
    """Checks the arguments of `Tiers`; returns the tables with tiers."""
    instance_of("collection", collection, Collection, "a jax_tt.Collection")
    if not isinstance(tiers, Mapping) or not tiers:
        expected = "a dict from tables to Tier, e.g. {'item': jax_tt.Tier(host_rows=10**6)}"
        raise mismatch("tiers", repr(tiers), expected, error=TypeError)
    expect_names("tiers", "table", tiers, collection.tables)
    for name, tier in tiers.items():
        instance_of(f"tiers[{name!r}]", tier, Tier, "a jax_tt.Tier")
        tier.check(name, collection.tables[name])
    # In an order that is the same in all processes.
    return {name: table for name, table in collection.tables.items() if name in tiers}


def check_same(
    processes: Processes,
    collection: Collection,
    tiers: Mapping[str, Tier],
    layouts: Mapping[str, RecordLayout],
    **others: Any,
) -> None:
    """Raises unless all processes decide the same of the same batches.

    Args:
        processes: that make tiers.
        collection, tiers: their arguments.
        layouts: of the records of each table, in the order of all processes.
        others: what must be the same as well.
    """
    if processes.alone:
        return
    features = [(name, spec.table) for name, spec in collection.features.items()]
    about: list[Any] = [sorted(others.items()), features]
    for name, layout in layouts.items():
        tier, rows = tiers[name], collection.tables[name].num_embeddings
        places = rows, tier.num_embeddings, tier.policy, tier.ways
        about.append((name, tier.about(layout), repr(tier.admission), places))
    digest = zlib.crc32(json.dumps(about, sort_keys=True, default=int).encode())
    digests = processes.of_each(np.array([digest], np.uint32))[:, 0]
    if (other := digests != digests[0]).any():
        raise ValueError(
            f"tiers: {processes.named(other)} has other settings than {processes.named(~other)}; expected the same "
            "tables and features in the same order, the same Tier for each but for host_rows, and the same "
            f"{' and '.join(sorted(others))} in every process."
        )

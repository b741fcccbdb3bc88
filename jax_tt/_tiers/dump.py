"""Tables with tiers in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._formats.dump import Dump
from jax_tt._ops.dump_content import Content, Target
from jax_tt._tiers.table import TieredRows


def dump_tier(rows: TieredRows, state: Mapping[str, Any], target: Target) -> int:
    """Writes all rows of a table, and the other arrays of its state; see `Tiers.dump`."""
    target.check()
    # In this order the files do not depend on where the rows are, so that a dump that was cut off goes on.
    keys, names = rows.keys(), rows.layout.names
    of_keys = {
        "key": keys,
        "score": np.zeros(len(keys), np.uint64),
        "touched": np.ones(len(keys), np.int32),
    }
    content = Content(
        rows.features,
        of_keys,
        {name: str(state[name].dtype) for name in names},
        lambda part: dict(zip(names, rows.entries(state, keys[part], names), strict=True)),
        {name: value for name, value in state.items() if name not in names},
        {"since": 0},
    )
    return target.write(content)


def load_tier(
    rows: TieredRows, names: Iterable[str], path: str | os.PathLike[str], progress: bool
) -> dict[str, np.ndarray]:
    """Puts the rows of a dump into host memory and on disk; returns its other arrays. See `Tiers.load_dump`."""
    dump, layout = Dump.open(path), rows.layout
    dump.check(rows.features, list(layout.names), exact=True)
    with Progress(progress, "load_dump", len(dump.files)) as bar:
        for part in dump.parts(dict(zip(layout.names, layout.shapes, strict=True))):
            pairs = zip(layout.names, layout.dtypes, strict=True)
            rows.put(part["key"], [part[name].astype(dtype) for name, dtype in pairs])
            bar.step()
    return dump.rest(names)

"""Tables with tiers in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_positive, one_of
from jax_tt._base.progress import Progress
from jax_tt._formats.dump import FORMATS, Dump, write_dump
from jax_tt._tiers.table import TieredRows


def dump_tier(
    rows: TieredRows,
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    keys_per_file: int,
    kind: str,
    progress: bool,
    *,
    overwrite: bool,
) -> int:
    """Writes all rows of a table, and the other arrays of its state; see `Tiers.dump`."""
    size = as_positive("keys_per_file", keys_per_file)
    one_of("format", kind, FORMATS)
    # In this order the files do not depend on where the rows are, so that a dump that was cut off goes on.
    keys, layout = rows.keys(), rows.layout

    def parts() -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, len(keys), size):
            part = keys[first : first + size]
            entries = rows.entries(state, part, layout.names)
            scores, touched = np.zeros(len(part), np.uint64), np.ones(len(part), np.int32)
            of_keys = {"key": part, "score": scores, "touched": touched}
            yield of_keys | dict(zip(layout.names, entries, strict=True))

    rest = {name: value for name, value in state.items() if name not in layout.names}
    about = {
        "features": rows.features,
        "since": 0,
        "arrays": {name: str(state[name].dtype) for name in layout.names},
    }
    with Progress(progress, "dump", -(-len(keys) // size)) as bar:
        return write_dump(path, parts(), rest, about, kind, bar, overwrite=overwrite)


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

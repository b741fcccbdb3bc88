"""Tables with tiers in files: the arrays beside the rows as bytes, and dumps of all rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._formats.dump import Dump
from jax_tt._ops.dump_content import Content, Target
from jax_tt._tiers.disk import StoreError
from jax_tt._tiers.lives import LIFE, Lives
from jax_tt._tiers.table import TieredRows


def to_bytes(arrays: Mapping[str, Mapping[str, Any]], other: bytes) -> bytes:
    """The arrays, and other bytes behind them."""
    described, parts = [], []
    for table, by_name in arrays.items():
        for name, value in by_name.items():
            array = np.asarray(value)
            described.append((table, name, array.dtype.name, array.shape))
            parts.append(array.tobytes())
    head = json.dumps(described).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *parts, other))


def from_bytes(data: bytes) -> tuple[dict[str, dict[str, np.ndarray]], bytes]:
    """The inverse of `to_bytes`."""
    start = 8 + int.from_bytes(data[:8], "little")
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for table, name, dtype, shape in json.loads(data[8:start]):
        count, kind = int(np.prod(shape)), jnp.dtype(dtype)
        array = np.frombuffer(data, kind, count, start).reshape(shape)
        arrays.setdefault(table, {})[name] = array
        start += array.nbytes
    return arrays, data[start:]


def check_like(
    saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Mapping[str, Any]], path: str
) -> None:
    """Raises unless saved arrays have the names, shapes and types of others."""
    got, expected = _described(saved), _described(like)
    for table, name in sorted(got.keys() | expected.keys()):
        pair = got.get((table, name)), expected.get((table, name))
        if pair[0] != pair[1]:
            raise StoreError(
                f"{path}: holds {pair[0] or 'nothing'} for {name!r} of {table!r}; expected {pair[1] or 'nothing'}, as "
                "the collection has it. Describe the tables as they were when they were saved, also if they have "
                "grown; they can be changed after that."
            )


def _described(arrays: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (table, name): f"{jnp.result_type(x)} of shape {jnp.shape(x)}"
        for table, by_name in arrays.items()
        for name, x in by_name.items()
    }


def lives_arrays(lives: Lives) -> dict[str, np.ndarray]:
    """The ages of rows and of keys that wait, as arrays by name."""
    clock, rows, waiting = lives.loaded()
    arrays = {"clock": np.array(clock)}
    for kind, entries in ("row", rows), ("waiting", waiting):
        arrays |= {f"{kind}_{name}": entries[name] for name in LIFE.names or ()}
    return arrays


def put_lives(lives: Lives, arrays: Mapping[str, np.ndarray]) -> None:
    """The inverse of `lives_arrays`."""
    both = []
    for kind in "row", "waiting":
        entries = np.zeros(len(arrays[f"{kind}_key"]), LIFE)
        for name in LIFE.names or ():
            entries[name] = arrays[f"{kind}_{name}"]
        both.append(entries)
    lives.put(int(arrays["clock"]), *both)


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

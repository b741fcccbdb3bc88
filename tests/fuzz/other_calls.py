"""Calls of the FFI targets of row caches, routes, scans and clocks with valid arguments, as the library makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.fuzz.calls import SHAPES, Call, one_after_another, result_type


def _int64(**numbers: Any) -> dict[str, np.int64]:
    return {name: np.int64(number) for name, number in numbers.items()}


def build_cache(rng: np.random.Generator) -> Call:
    """A search, the count of a batch, or an exchange of rows, in a small directory of either type of ids."""
    op = str(rng.choice(["probe", "observe", "populate"]))
    sets, ways, each, room = (int(rng.integers(1, most)) for most in (5, 6, 3, 5))
    ids = str(rng.choice(["int32", "int64"]))
    slots, ghosts = (sets, ways), (sets * each, room)
    keys = rng.integers(-1, 40, int(rng.choice([0, 1, 50]))).astype(ids)
    tags = rng.integers(-1, 40, slots).astype(ids)
    if op == "probe":
        return Call("jax_tt_cache_probe_v1", [tags, keys], [result_type(keys.shape, "int32")], {})
    numbers = [
        rng.integers(0, 9, shape, np.int32) for shape in (slots, slots, ghosts, ghosts, ghosts)
    ]
    changed = [*numbers[:2], rng.integers(-1, 40, ghosts).astype(ids), *numbers[2:]]
    results, clock = [result_type((4,), "int32")], np.int32(rng.integers(1, 20))
    args: list[Any]
    attributes: dict[str, Any]
    if op == "observe":
        known = rng.integers(-1, sets * ways + 1, keys.shape).astype(np.int32)
        args = [keys, known, np.int32(3), clock, tags]
        attributes = {"policy": str(rng.choice(["lfu", "lru"]))}
    else:
        args, attributes = [clock], {}
        changed, results = [tags, *changed], [result_type(slots, ids), *results]
    aliases = {len(args) + k: len(results) + k for k in range(len(changed))}
    results += [result_type(array.shape, array.dtype) for array in changed]
    return Call(f"jax_tt_cache_{op}_v1", [*args, *changed], results, attributes, aliases)


def build_route(rng: np.random.Generator) -> Call:
    n, devices, size, bags = (int(rng.integers(low, 6)) for low in (0, 1, 0, 1))
    device = rng.integers(0, devices + 1, n).astype(np.int32)
    row = rng.integers(0, 9, n).astype(np.int32)
    if rng.integers(2):
        results = [result_type((n,), "int32")] * 4
        return Call("jax_tt_route_distinct_v1", [device, row], results, _int64(devices=devices))
    bag = np.sort(rng.integers(0, bags, n)).astype(np.int32)
    shapes = [(devices, size)] * 2 + [(devices, bags + 1), ()]
    results = [result_type(shape, "int32") for shape in shapes]
    attributes = _int64(devices=devices, size=size, bags=bags)
    return Call("jax_tt_route_bags_v1", [device, row, bag], results, attributes)


def build_scan(rng: np.random.Generator) -> Call:
    """The best rows of a dense, a coded or a tensor-train table."""
    op, rows = str(rng.choice(["rows", "coded", "train"])), int(rng.integers(1, 90))
    k, queries, excluded = (int(rng.integers(low, 9)) for low in (1, 0, 0))
    attributes: dict[str, Any] = _int64(k=k)
    if op == "rows":
        dim = int(rng.integers(1, 20))
        table = rng.normal(size=(rows, dim))
        arrays = [table.astype(jnp.dtype(rng.choice(["float32", "bfloat16", "float16"])))]
    elif op == "coded":
        parts, terms, bits, width = (int(rng.integers(1, most)) for most in (4, 3, 9, 5))
        dim = parts * width
        codes = rng.integers(0, 256, (rows, -(-parts * terms * bits // 8)), np.uint8)
        books = rng.normal(size=(parts * terms << bits, width)).astype(np.float32)
        arrays = [codes, np.zeros((0, 0), np.uint8), np.zeros((0, 17), np.uint32), books]
        attributes |= _int64(bits=bits, terms=terms, hot_terms=0)
    else:
        p, q, r, rows = SHAPES[int(rng.integers(len(SHAPES)))]
        dim, sizes = int(np.prod(q)), {"row_factors": p, "col_factors": q, "ranks": r}
        attributes |= {name: np.asarray(value, np.int64) for name, value in sizes.items()}
        attributes |= _int64(num_embeddings=rows)
        shapes = [(p[k], r[k], q[k], r[k + 1]) for k in range(len(p))]
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    vectors = rng.normal(size=(queries, dim)).astype(np.float32)
    exclude = rng.integers(-1, rows, (queries, excluded)).astype(np.int32)
    present = rng.integers(0, 2, rows if rng.integers(2) else 0).astype(bool)
    results = [result_type((queries, k), dtype) for dtype in ("float32", "int32")]
    return Call(f"jax_tt_scan_{op}_v1", [vectors, exclude, present, *arrays], results, attributes)


def build_clocks(rng: np.random.Generator) -> Call:
    """The numbers of batches of up to three directories, which are set back where a clock has come to its end."""
    whole = Call("jax_tt_hash_tables_set_back_v1", [], [], {})
    return one_after_another(whole, [_clock(rng) for _ in range(rng.integers(1, 4))])


def _clock(rng: np.random.Generator) -> Call:
    words = rng.integers(-1, 2, rng.integers(1, 4))
    arrays = []
    for word in words:
        sets, ways = rng.integers(1, 5, 2)
        shape, dtype = ((sets, ways), np.int32) if word < 0 else ((sets, 2, ways), np.uint32)
        arrays.append(rng.integers(0, 99, shape).astype(dtype))
    attributes = _int64(arrays=len(words), last=90, kept=40)
    attributes |= _int64(**{f"word_{k}": word for k, word in enumerate(words)})
    results = [result_type(array.shape, array.dtype) for array in arrays]
    aliases = {1 + k: k for k in range(len(arrays))}
    args: list[Any] = [np.int32(rng.integers(80, 99)), *arrays]
    return Call("", args, results, attributes, aliases)


BUILDERS: tuple[Callable[[np.random.Generator], Call], ...] = (
    build_cache, build_route, build_scan, build_clocks
)  # fmt: skip

"""Runs every native op once and writes the results: ``python -m tests.native.native_run OUT.npz [again]``.

What JAX_TT_NUM_THREADS and JAX_TT_CPU_ISA change is read once per process, so tests compare processes.  With ``again``,
it runs them once more, where memory and threads are warm, and compares.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt import optimizers
from jax_tt._directories.hash_directory import Eviction, init_directory
from jax_tt._directories.initial import Normal
from jax_tt._native import hash_backend
from jax_tt._native.hash import Fresh, Reset
from tests.helpers import SHAPES, fused, make_case

BAGS = 24  # of chunked batches
# So many columns that the 3,200 rows of chunked_batch take more memory than one chunk may.
CHUNKED = {
    "d2": jax_tt.TTShape(40_000, 9216, 4, (200, 200), (96, 96)),
    "d3": jax_tt.TTShape(27_000, 10_000, 6, (30, 30, 30), (20, 20, 25)),
    "d4": jax_tt.TTShape(20_736, 10_000, 3, (12, 12, 12, 12), (10, 10, 10, 10)),
}
# Rows that are joined from 2, 4 and 8 columns: ranks that fill vectors, ranks that do not, rows that overlap.
JOINS = {
    "join-2": jax_tt.TTShape(500, 20, (16, 16), (8, 8, 8), (2, 5, 2)),
    "join-4": jax_tt.TTShape(300, 32, (32, 32), (8, 5, 8), (4, 2, 4)),
    "join-4-overlap": jax_tt.TTShape(216, 24, 16, (6, 6, 6), (3, 2, 4)),
    "join-4-odd-rank": jax_tt.TTShape(300, 32, (23, 23), (8, 5, 8), (4, 2, 4)),
    "join-8": jax_tt.TTShape(80, 64, (32, 32), (4, 5, 4), (8, 1, 8)),
}
# Two cores: the wider one left or right, columns that are reordered, gradients of short and of long rows.
PAIRS = {
    "pair-column": jax_tt.TTShape(60, 32, 8, (5, 12), (32, 1)),
    "pair-row": jax_tt.TTShape(60, 32, 8, (12, 5), (1, 32)),
    "pair-equal": jax_tt.TTShape(300, 64, 32, (12, 25), (8, 8)),
    "pair-left": jax_tt.TTShape(36, 24, 16, (6, 6), (6, 4)),
    "pair-left-short": jax_tt.TTShape(300, 36, 5, (15, 20), (12, 3)),
    "pair-right-odd": jax_tt.TTShape(70, 15, 7, (7, 10), (3, 5)),
}
# Columns of dense tables: whole vectors of each instruction set, halves and quarters of them, and others.
WIDTHS = (1, 3, 4, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 72, 80, 96, 112, 128, 129, 144, 200)
# Columns of packed rows: whole vectors of 8 and 16 numbers, as many as registers hold and more, and what is left.
PACKED_WIDTHS = (3, 8, 16, 24, 40, 64, 77, 112, 128, 200)
RULES = {
    "sgd": optimizers.SGD(0.05),
    "adagrad": optimizers.Adagrad(0.05),
    "rowwise": optimizers.RowWiseAdagrad(0.05),
    "adam": optimizers.Adam(0.01),
}


def chunked_batch(shape: jax_tt.TTShape) -> tuple[tuple[jax.Array, ...], jax_tt.Bags, jax.Array]:
    """Cores, weighted bags of more rows than one chunk holds, and a gradient from above."""
    rng = np.random.default_rng(3)
    cores = tuple(
        jnp.asarray(rng.normal(size=core) / core[1] ** 0.5, jnp.float32)
        for core in shape.core_shapes
    )
    lengths = rng.multinomial(3600, np.ones(BAGS) / BAGS)
    ids = rng.integers(0, shape.num_embeddings, lengths.sum()).astype(np.int32)
    ids[::9] = ids[0]
    weights = rng.uniform(0.5, 1.5, ids.size).astype(np.float32)
    bags = jax_tt.Bags.from_lengths(ids, lengths, weights)
    g = jnp.asarray(rng.normal(size=(BAGS, shape.features)), jnp.float32)
    return cores, bags, g


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(op: Any, method: str, table: Any, bags: jax_tt.Bags, g: jax.Array) -> Any:
    def loss(table: Any, weights: Any) -> Any:
        out = op(table, dataclasses.replace(bags, weights=weights), method=method)
        return jnp.sum(out.astype(jnp.float32) * g), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(table, bags.weights)


def gradients(
    table: Any, bags: jax_tt.Bags, g: jax.Array, method: str, op: Any = jax_tt.tt.embed_bag
) -> Any:
    """Output, and gradients of the table and of the weights."""
    (_, out), (dtable, dweights) = _gradients(op, method, table, bags, g)
    return out, *jax.tree.leaves(dtable), *([] if dweights is None else [dweights])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(table: Any, method: str, state: Any, bags: Any, g: jax.Array) -> Any:
    def loss(state: Any) -> jax.Array:
        out, _ = jax_tt.lookup_bags(table, state, bags, bounds="error", method=method)
        return jnp.sum(out.astype(jnp.float32) * g)

    return jax.grad(loss)(state)


def steps(table: Any, state: Any, bags: Any, g: jax.Array, method: str) -> Any:
    """The arrays of a table after three fused steps."""
    for _ in range(3):
        state = _step(table, method, state, bags, g)
    return jax.tree.leaves(state)


def chunked_results() -> Iterator[tuple[str, list[Any]]]:
    for name, shape in CHUNKED.items():
        cores, bags, g = chunked_batch(shape)
        yield f"chunked {name}", list(gradients(cores, bags, g, "native"))
    yield "chunked fused", steps(*fused(cores, RULES["adagrad"]), bags, g, "native")


def wide_bags(weighted: bool) -> tuple[list[jax.Array], jax_tt.Bags]:
    """A table of every width, and bags of none, one and more rows than a kernel takes at once."""
    rng = np.random.default_rng(4)
    tables = [jnp.asarray(rng.standard_normal((50, width)), jnp.float32) for width in WIDTHS]
    lengths = np.array([0, 1, 1, 300, 5, 0, 2, 259])
    ids = rng.integers(0, 50, lengths.sum()).astype(np.int32)
    weights = rng.standard_normal(ids.size).astype(np.float32) if weighted else None
    return tables, jax_tt.Bags.from_lengths(ids, lengths, weights)


@jax.jit
def wide_sums(tables: list[jax.Array], bags: jax_tt.Bags) -> Any:
    """Sums, and gradients of a loss, of every table."""

    def loss(tables: list[jax.Array]) -> Any:
        sums = [jax_tt.functional.embed_bag(table, bags, method="native") for table in tables]
        return sum(jnp.vdot(pooled, pooled) / 2 for pooled in sums), sums

    gradients, sums = jax.grad(loss, has_aux=True)(tables)
    return sums, gradients


def packed_rows() -> list[jax.Array]:
    """Rows of all numbers of bits and widths: scale and offset in float16, then the numbers."""
    rng, rows = np.random.default_rng(7), []
    for bits, width in itertools.product((8, 4, 3, 2), PACKED_WIDTHS):
        header = rng.standard_normal((50, 2)).astype(np.float16).view(np.uint8)
        numbers = rng.integers(0, 256, (50, -(-width * bits // 8)), np.uint8)
        rows.append(jnp.asarray(np.concatenate([header, numbers], axis=1)))
    return rows


@functools.partial(jax.jit, static_argnums=0)
def packed_sums(levels: bool, rows: list[jax.Array], bags: jax_tt.Bags) -> list[jax.Array]:
    """Sums of packed rows, with levels that are uniform or others."""
    sums = []
    for (bits, width), packed in zip(
        itertools.product((8, 4, 3, 2), PACKED_WIDTHS), rows, strict=True
    ):
        top = (1 << bits) - 1
        given = tuple(round(512 * k**2 / top) / 512 for k in range(top + 1))
        own = given if levels and bits < 8 else None
        table = jax_tt.tables.QuantizedTable(50, width, bits, levels=own)
        sums.append(jax_tt.lookup_bags(table, {"packed": packed}, bags, method="native")[0])
    return sums


@functools.cache
def collection_step() -> tuple[Any, ...]:
    """A step of tensor trains in one call, one of which has most of the work, and its arguments."""
    tables = {
        f"t{n}": jax_tt.tt_table(n, 16, tt_ranks=ranks, optimizer=RULES["adagrad"])
        for n, ranks in ((40_000, 24), (900, 5), (300, 5), (70, 4), (31, 2))
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    collection = jax_tt.Collection(tables, features)
    rng = np.random.default_rng(5)
    batch = {name: jnp.asarray(rng.integers(0, 31, (50, 3)), jnp.int32) for name in tables}
    batch["t40000"] = jnp.asarray(rng.integers(0, 40_000, (700, 5)), jnp.int32)
    state = jax.jit(collection.init)(jax.random.key(0))

    def loss(trained: Any, batch: Any) -> Any:
        arrays, lookup = collection.replaced(state, trained), jax_tt.Lookup(method="native")
        rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
        return sum(jnp.sum(jnp.sin(out)) for out in rows.values()), rows

    return jax.jit(jax.grad(loss, has_aux=True)), collection.trained(state), batch


def hash_results() -> Iterator[tuple[str, list[Any]]]:
    """A table of keys that is filled beyond its capacity and doubled, for sets of whole vectors and others."""
    rng = np.random.default_rng(5)
    insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
    epoch, n = jnp.uint32(2), 9000
    for ways in (4, 8, 16, 33):
        directory = init_directory(6000 // ways, ways)
        keys = rng.integers(9000, size=(3, n, 2), dtype=np.uint32) * np.array([0, 1], np.uint32)
        here = rng.random((3, n)) < 0.9
        done: list[Any] = []
        for now, batch in enumerate(keys, 1):
            stamps = jnp.zeros((n, 2), jnp.uint32), jnp.int32(now), epoch
            directory, of_batch = insert(
                directory, batch, here[now - 1], *stamps, Eviction("lfu"), "native"
            )
            done.append(of_batch)
        found = hash_backend.find(directory, keys[0], here[2], "native")
        rows = jnp.zeros((directory.capacity, 7))
        seed, new_keys = jnp.array([1, 2], jnp.uint32), done[-1].keys
        fresh = Fresh(seed, new_keys, here[0] | True, Normal(0.1), 7, jnp.float32)
        (new,) = hash_backend.initial_many([fresh], ["native"])
        reset = Reset(rows, seed, new_keys, done[-1].slots, Normal(0.1))
        changed = hash_backend.exchange([rows], [new], done[-1].slots, "native", return_old=True)
        doubled = hash_backend.double(directory, changed[0], "native")
        last = hash_backend.reset_many([reset], ["native"]), changed, doubled
        yield f"hash {ways}", jax.tree.leaves((directory, done, found, new, last))


def long_sums() -> list[Any]:
    """Rows that are read thousands of times, and bags of thousands of rows."""
    rng = np.random.default_rng(6)
    ids = jnp.asarray(np.minimum(rng.integers(0, 9, 9000), rng.integers(0, 9, 9000)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=9000), jnp.float32)
    cuts = [0, 3, 3000, 3100, *range(3101, 9001)]
    bags = jax_tt.Bags(ids, jnp.asarray(cuts, jnp.int32), weights)
    g = jnp.asarray(rng.normal(size=(len(cuts) - 1, 12)), jnp.float32)
    shape = jax_tt.TTShape(9, 12, 4, (3, 3), (3, 4))
    cores = jax_tt.tt.init(jax.random.key(1), shape)
    dense = jax_tt.tt.to_dense(cores)
    return [
        jax_tt.functional.embed_bag(dense, bags, method="native"),
        *gradients(cores, bags, g, "native"),
        *steps(*fused(dense, RULES["adagrad"]), bags, g, "native"),
    ]


def results() -> Iterator[tuple[str, list[Any]]]:
    yield "long sums", jax.tree.leaves(long_sums())
    yield from chunked_results()
    for weighted in (False, True):
        tables, bags = wide_bags(weighted)
        yield f"widths {weighted}", jax.tree.leaves(wide_sums(tables, bags))
        yield f"packed {weighted}", packed_sums(weighted, packed_rows(), bags)
    shapes = {name: SHAPES[name] for name in ("d2", "d3-odd", "d5")} | JOINS | PAIRS
    for name, shape in shapes.items():
        case = make_case(shape, "float32", True)
        g = jnp.asarray(case.g, jnp.float32)
        yield f"{name} gradients", list(gradients(case.cores, case.bags(), g, "native"))
    case = make_case(SHAPES["d4"], "float32", True)
    g = jnp.asarray(case.g, jnp.float32)
    dense = jax_tt.tt.to_dense(case.cores)
    for name, rule in RULES.items():
        for start in (case.cores, dense):
            kind = "dense" if start is dense else "tt"
            found = steps(*fused(start, rule), case.bags("rectangular"), g, "native")
            yield f"fused {kind} {name}", found
    # 16-bit storage: rounding must not depend on threads either.
    half = make_case(SHAPES["d3"], "bfloat16", False)
    g = jnp.asarray(half.g, jnp.float32)
    leaves = steps(*fused(half.cores, RULES["adagrad"]), half.bags(), g, "native")
    yield "fused bfloat16", [leaf.astype(jnp.float32) for leaf in leaves]
    step, trained, batch = collection_step()
    yield "collection", jax.tree.leaves(step(trained, batch))
    yield from hash_results()


if __name__ == "__main__":
    from jax_tt import _cpu

    arrays = {"isa": np.array(_cpu.instruction_set())}
    for name, leaves in results():
        arrays |= {f"{name} {k}": np.asarray(leaf) for k, leaf in enumerate(leaves)}
    for name, leaves in results() if "again" in sys.argv else ():
        for k, leaf in enumerate(leaves):
            assert np.asarray(leaf).tobytes() == arrays[f"{name} {k}"].tobytes(), (
                f"{name} differs run to run"
            )
    np.savez(sys.argv[1], **arrays)
    print(os.environ.get("JAX_TT_NUM_THREADS"), arrays["isa"])

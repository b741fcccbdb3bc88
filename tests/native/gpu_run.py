"""Every op once or twice on a GPU, small enough for compute-sanitizer; compared with the reference on the CPU.

python -m tests.native.gpu_run
"""

import argparse
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_tt
from tests.helpers import SHAPES, assert_close, fused, make_case
from tests.kinds.cached import cache_parts
from tests.native.native_run import CHUNKED, RULES, chunked_batch, gradients, steps

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass
class Work:
    """A batch on a table, and what is done with it.

    Attributes:
        start: cores, or a dense table.
        rules: names in RULES, each for three fused steps; the gradients are taken once.
        precision: of `jax.default_matmul_precision`; None leaves it unset.
        skip: the value of ``skip_nonfinite``.
        cache: reads the table through this cache instead, in steps of the first rule alone.
    """

    name: str
    start: Any
    bags: jax_tt.Bags
    g: jax.Array
    rules: tuple[str, ...] = ()
    precision: str | None = None
    skip: bool = False
    cache: jax_tt.RowCache | None = None


def _batch(
    num_rows: int, features: int, n: int, hot: int, seed: int
) -> tuple[jax_tt.Bags, jax.Array]:
    """21 weighted bags of n random rows, one of them read `hot` times, and a gradient from above."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, num_rows, n).astype(np.int32)
    ids[rng.permutation(n)[:hot]] = num_rows // 2
    weights = rng.uniform(0.5, 1.5, n).astype(np.float32)
    bags = jax_tt.Bags.from_lengths(ids, rng.multinomial(n, np.ones(21) / 21), weights)
    return bags, jnp.asarray(rng.normal(size=(21, features)), jnp.float32)


def _table(
    name: str, rows: Any, columns: Any, rank: int, n: int, dtype: str, **options: Any
) -> Work:
    """A TT table of three cores and equal ranks."""
    rng = np.random.default_rng(rank)
    edges = (1, rank, rank, 1)
    cores = tuple(
        jnp.asarray(
            rng.normal(size=(rows[k], edges[k], columns[k], edges[k + 1])) / edges[k] ** 0.5, dtype
        )
        for k in range(3)
    )
    bags, g = _batch(math.prod(rows), math.prod(columns), n, n // 8, rank)
    return Work(f"{name}, {dtype}", cores, bags, g, **options)


def small() -> Iterator[Work]:
    """What kernels for any shape differ by: three cores and more, odd sizes, storage."""
    for name, dtype in (
        ("d3", "float32"),
        ("d3-odd", "bfloat16"),
        ("d4", "float16"),
        ("d2", "float32"),
    ):
        case = make_case(SHAPES[name], dtype, True)
        bags, g = case.bags(), jnp.asarray(case.g, jnp.float32)
        rules = ("sgd", "adam") if dtype == "float32" else ("adagrad",)
        yield Work(f"{name}, {dtype}", case.cores, bags, g, rules)
        table = jax_tt.tt.to_dense(case.cores, case.shape.num_embeddings)
        yield Work(f"{name} dense, {dtype}", table, bags, g, rules)


def specialised() -> Iterator[Work]:
    """Equal ranks that have kernels of their own: either side of the middle core first, every kind of product."""
    few = (7, 2, 11)  # several tiles of one slice of the middle core
    columns = {"": (4, 4, 4), " mirrored": (8, 4, 4)}
    plan = (
        (16, "", " mirrored", "bfloat16"),
        (32, " mirrored", "", "float16"),
        (64, "", " mirrored", "float16"),
        (128, " mirrored", "", "bfloat16"),
    )
    for rank, full, rounded, narrow in plan:
        for side, dtype, precision in (
            (full, "float32", None),
            (rounded, "float32", "tensorfloat32"),
            (full, narrow, None),
        ):
            name = f"rank {rank}{side}{' TF32' if precision else ''}"
            yield _table(name, few, columns[side], rank, 230, dtype, precision=precision)


def large() -> Iterator[Work]:
    """Sorts of several tiles and passes, rows that blocks sum, more rows than a chunk holds."""
    yield _table("17,000 ids", (1100, 2, 2000), (4, 4, 4), 16, 17_000, "float32", rules=("sgd",))
    table = jnp.asarray(np.random.default_rng(0).normal(size=(1500, 36)), jnp.float32)
    bags, g = _batch(*table.shape, 17_000, 200, 1)
    yield Work("a row read 200 times", table, bags, g, ("sgd", "rowwise"))
    yield Work("a row read 200 times, skipping", table, bags, g, ("adam",), skip=True)
    cores, bags, g = chunked_batch(CHUNKED["d2"])
    yield Work("several chunks", cores, bags, g)
    # So many that the blocks of a sort wait for those before them.
    yield _table("70,000 ids", (1100, 2, 2000), (4, 4, 4), 16, 70_000, "float32", rules=("sgd",))
    table = jnp.asarray(np.random.default_rng(0).normal(size=(90_000, 8)), jnp.float32)
    yield Work("70,000 ids, dense", table, *_batch(*table.shape, 70_000, 200, 1), ("sgd",))


def cached() -> Iterator[Work]:
    """Row caches of both policies: sets that a warp covers and more, rows that enter, leave and are trained."""
    for policy, ways in (("lfu", 32), ("lru", 33)):
        cache = jax_tt.RowCache(3 * ways, ways, policy, counters=400, write_back=None)
        yield _table(
            f"cached, {policy}",
            (7, 8, 11),
            (2, 2, 4),
            4,
            700,
            "float32",
            rules=("adagrad",),
            cache=cache,
        )


def cached_steps(work: Work, cache: jax_tt.RowCache, method: str) -> list[Any]:
    """Outputs of four batches that populate the cache in turn, and the table after them."""
    rule = RULES[work.rules[0]]
    size = math.prod(core.shape[0] for core in work.start)
    options = {"num_embeddings": size, "optimizer": rule}
    table = cache_parts.init_parts(fused(work.start, rule)[1], cache, **options)
    options["method"] = method

    @jax.jit
    def step(table: cache_parts.Parts, bags: jax_tt.Bags, g: jax.Array) -> Any:
        def loss(cores: Any, rows: Any) -> Any:
            given = table._replace(table=cores, rows=rows)
            out, directory = cache_parts.embed_bag(given, bags, cache, **options)
            return jnp.vdot(out, g), (out, directory)

        (cores, rows), (out, directory) = jax.grad(loss, (0, 1), has_aux=True)(
            table.table, table.rows
        )
        table = table._replace(table=cores, rows=rows, directory=directory)
        return out, cache_parts.populate(table, cache, **options)

    outputs = []
    for k in range(4):
        # Other favourites in every batch, so that rows leave; few enough different ones, so that some are hit.
        bags = dataclasses.replace(work.bags, ids=(work.bags.ids + 40 * k) % (size // 2))
        out, table = step(table, bags, work.g)
        outputs.append(out)
    return outputs + jax.tree.leaves(table)


@dataclasses.dataclass
class Program:
    """What is not a lookup in one table; `run` makes its arrays itself, on the default device, and returns leaves."""

    name: str
    run: Callable[[str], Any]


# Rows, columns, whether it is a tensor train, and the rule; beside them is a table of keys.
TOGETHER = {
    "dense": (700, 16, False, "rowwise"),
    "dense again": (90, 16, False, "rowwise"),
    "wide": (33, 64, False, "adam"),
    "odd": (50, 5, False, "sgd"),
    "train": (4000, 64, True, "rowwise"),
    "train again": (900, 64, True, "rowwise"),
    "general": (60, 8, True, "sgd"),
}


def initialized(init: Callable[[jax.Array], Any]) -> Any:
    """A state with the same numbers on every device, where normal numbers differ in their last bits."""
    device = jax.config.jax_default_device or jax.devices()[0]
    with jax.default_device(jax.devices("cpu")[0]):
        state = jax.jit(init)(jax.random.key(0))
    return jax.device_put(state, device)


def collection_of(count: int) -> tuple[jax_tt.Collection, Any]:
    """A collection of every kind of table, `count` times, one table of keys, and a batch."""
    rng, tables, batch = np.random.default_rng(1), {}, {}
    for k in range(count):
        for name, (rows, columns, train, rule) in TOGETHER.items():
            own, optimizer = f"{name} {k}", RULES[rule]
            if train:
                ranks = 16 if columns == 64 else 3
                tables[own] = jax_tt.tt_table(rows, columns, tt_ranks=ranks, optimizer=optimizer)
            else:
                tables[own] = jax_tt.dense_table(rows, columns, optimizer=optimizer)
            batch[own] = jax_tt.Bags(rng.integers(0, rows, (21, 3)).astype(np.int32))
    tables["keys"] = jax_tt.hash_table(64, 16, optimizer=RULES["sgd"], ways=32)
    batch["keys"] = jax_tt.Bags(jax_tt.dynamic.split_keys(rng.integers(0, 2**62, (21, 2))))
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    return collection, jax.tree.map(jnp.asarray, batch)


def stepped_together(count: int, method: str) -> Any:
    """Rows and state of a step of all tables in one call; the keys of the batch are inserted before."""
    collection, batch = collection_of(count)
    lookup = jax_tt.Lookup(method=method)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        inserted, state = jax_tt.dynamic.insert(collection, state, batch, method=method)
        batch = jax_tt.dynamic.with_slots(batch, inserted)

        def loss(own: Any) -> Any:
            arrays = collection.replaced(state, own)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
            return jnp.sum(jnp.stack([jnp.sum(jnp.sin(out)) for out in rows.values()])), rows

        gradients, rows = jax.grad(loss, has_aux=True)(collection.trained(state))
        return rows, collection.overwritten(state, gradients)[0]

    return step(initialized(collection.init), batch)


def inserted_keys(count: int, rows: int, method: str) -> Any:
    """Two batches of keys, more than the table has rows, and what finds them."""
    table = jax_tt.hash_table(rows, 8, policy="lru", safe_check="ignore", optimizer=RULES["sgd"])
    rng = np.random.default_rng(2)
    state = initialized(table.init)
    insert = jax.jit(lambda state, keys: jax_tt.dynamic.insert(table, state, keys, method=method))
    lookup, found = jax_tt.Lookup(method=method), []
    for _ in range(2):
        keys = jax.tree.map(
            jnp.asarray, jax_tt.dynamic.split_keys(rng.integers(0, 2 * count, count))
        )
        _, state = insert(state, keys)
        found.append(jax.jit(lambda s, k: jax_tt.lookup(table, s, k, lookup)[0])(state, keys))
    return found, state


def pooled(method: str) -> Any:
    """Bags of tables that are read alone: with few bits, with codes, and of tables of these."""
    n, columns = 600, 16
    quantized = [jax_tt.tables.QuantizedTable(n // 2, columns, bits) for bits in (8, 4)]
    tables = [*quantized, jax_tt.coded_table(n, columns, num_codes=8, bits=6)]
    tables.append(jax_tt.tables.MixedTable(tuple(quantized)))
    train = jax_tt.tt_table(n, columns, tt_ranks=4)
    tables.append(jax_tt.tables.SumTable((train, train)))
    lookup, found = jax_tt.Lookup(method=method), []
    for table in tables:
        ids = np.random.default_rng(3).integers(0, table.num_embeddings, (21, 5)).astype(np.int32)
        state = initialized(table.init)
        bags = jax_tt.Bags(jnp.asarray(ids))
        found.append(
            jax.jit(lambda s, b, t=table: jax_tt.lookup_bags(t, s, b, lookup)[0])(state, bags)
        )
    return found


def sharded(method: str) -> Any:
    """Steps of a dense table and a tensor train whose batch is divided over a mesh of one device."""
    device = jax.config.jax_default_device or jax.devices()[0]
    mesh = Mesh(np.array([device]), ("batch",), axis_types=(AxisType.Auto,))
    found = []
    for start in (_table("", (7, 8, 11), (4, 4, 4), 16, 210, "float32").start, jnp.ones((616, 64))):
        table, state = fused(start, RULES["adagrad"])
        ids = jnp.asarray(np.random.default_rng(4).integers(0, 616, (20, 5)), jnp.int32)
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("batch")))

        def loss(state: Any, ids: jax.Array, table: Any = table) -> jax.Array:
            return jnp.sum(jnp.sin(jax_tt.lookup_bags(table, state, ids, method=method)[0]))

        found.append(jax.jit(jax.grad(loss))(state, ids))
    return found


def together() -> Iterator[Program]:
    """Collections: few tables, and so many that their descriptions fill what a launch may be given."""
    yield Program("tables together", functools.partial(stepped_together, 2))
    yield Program("a mesh of one device", sharded)


def many() -> Iterator[Program]:
    yield Program("300 tables together", functools.partial(stepped_together, 43))


def keys() -> Iterator[Program]:
    """Keys that one block sorts, and more."""
    yield Program("500 keys", functools.partial(inserted_keys, 500, 640))
    yield Program("13,000 keys", functools.partial(inserted_keys, 13_000, 16_384))


def others() -> Iterator[Program]:
    yield Program("tables that are read alone", pooled)


def run(work: Work, method: str) -> dict[str, list[Any]]:
    if work.cache is not None:
        return {"steps through the cache": cached_steps(work, work.cache, method)}
    op = jax_tt.tt.embed_bag if isinstance(work.start, tuple) else jax_tt.functional.embed_bag
    results = {"gradients": list(gradients(work.start, work.bags, work.g, method, op))}
    for rule in work.rules:
        made = fused(work.start, RULES[rule], skip_nonfinite=work.skip)
        results[rule] = steps(*made, work.bags, work.g, method)
    return results


def _check_program(program: Program) -> list[str]:
    results = program.run("native")
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = program.run("reference")
    assert jax.tree.structure(results) == jax.tree.structure(wanted)
    for k, (got, want) in enumerate(
        zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True)
    ):
        if jnp.issubdtype(want.dtype, jnp.floating):
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            assert_close(got, want, TOLERANCE["float32"], f"{program.name}: {k}")
        elif not jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(got, want, err_msg=f"{program.name}: {k}")
    return ["results"]


def check(work: Work | Program) -> list[str]:
    """Runs it natively here and by the reference on the CPU; returns what was compared."""
    if isinstance(work, Program):
        return _check_program(work)
    with contextlib.ExitStack() as stack:
        if work.precision is not None:
            stack.enter_context(jax.default_matmul_precision(work.precision))
        results = run(work, "native")
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        local = jax.device_put((work.start, work.bags, work.g), cpu)
        wanted = run(
            dataclasses.replace(work, start=local[0], bags=local[1], g=local[2]), "reference"
        )
    dtype = str(jax.tree.leaves(work.start)[0].dtype)
    tolerance = TOLERANCE[dtype] if work.precision is None else 5e-3
    for key, leaves in results.items():
        if dtype != "float32" and key != "gradients":
            continue  # rounding is stochastic
        for k, (got, want) in enumerate(zip(leaves, wanted[key], strict=True)):
            what = f"{work.name}: {key} {k}"
            if jnp.issubdtype(want.dtype, jnp.integer):
                np.testing.assert_array_equal(got, want, err_msg=what)
                continue
            got, want = (np.asarray(jnp.asarray(x, jnp.float32)) for x in (got, want))
            assert_close(got, want, tolerance, what)
    return list(results)


GROUPS: dict[str, Callable[[], Iterator[Work | Program]]] = {
    "small": small,
    "together": together,
    "keys": keys,
    "others": others,
    "specialised": specialised,
    "cached": cached,
    "large": large,
    "many": many,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", choices=GROUPS, help="default: all")
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    for group in parser.parse_args().groups or GROUPS:
        for work in GROUPS[group]():
            done = ", ".join(check(work))
            print(f"{work.name}: {done} agree with the reference ({platform})", flush=True)


if __name__ == "__main__":
    main()

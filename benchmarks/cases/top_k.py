"""The best rows of tables for queries, beside faiss and beside the flops that a tensor train needs."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders import numpy_matmul
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave

FEATURES, K = 64, 100
BATCHES = (1, 32, 256)
OURS, FAISS = "jax_tt", "faiss"
TRAIN = "tensor train of rank 16, 11,000,000 rows"
MATMUL = ("machine", "numpy matmul")


@case("top_k", "The best 100 rows for 1, 32 and 256 queries, of 1,000,000 rows of 64 columns")
def measure(settings: Settings, report: Report) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3000 if settings.quick else 1_000_000, FEATURES), np.float32)
    queries = rng.standard_normal((BATCHES[-1], FEATURES), np.float32)
    faiss = peer("faiss_index", report)
    if faiss is not None:
        faiss.use_threads(os.cpu_count() or 1)
    for name, made in _tables(rows, faiss).items():
        table, state, index = made()
        _compare(settings, report, name, _search(table, state, queries), index, queries)
    _train(settings, report, queries)


def _tables(rows: np.ndarray, faiss: Any) -> dict[str, Callable[[], tuple[Any, Any, Any]]]:
    """Tables with their states and an index of faiss, or None, by name; made one at a time."""

    def floats() -> tuple[Any, Any, Any]:
        table = jax_tt.dense_table(*rows.shape)
        return table, {"embedding": jnp.asarray(rows)}, faiss and faiss.flat(rows)

    def scalars() -> tuple[Any, Any, Any]:
        return *jax_tt.quantize(rows, bits=8), faiss and faiss.scalars(rows)

    def codes(bits: int) -> tuple[Any, Any, Any]:
        table = jax_tt.coded_table(*rows.shape, num_codes=16, bits=bits)
        state = jax.jit(table.init)(jax.random.key(0))
        state["codebooks"] = jax.random.normal(jax.random.key(1), state["codebooks"].shape)
        if faiss is None:
            return table, state, None
        arrays = state["codebooks"], table.codes(state), state["codes"]
        return table, state, faiss.products(*map(np.asarray, arrays))

    return {
        "float32": floats,
        "8 bits a number": scalars,
        "16 codes of 4 bits": lambda: codes(4),
        "16 codes of 8 bits": lambda: codes(8),
    }


def _search(table: Any, state: Any, queries: np.ndarray) -> dict[int, Callable[[], Any]]:
    """Scores and ids for the first queries, by their number."""
    program = jax.jit(lambda state, queries: jax_tt.top_k(table, state, queries, K))
    batches = {n: jnp.asarray(queries[:n]) for n in BATCHES}
    return {
        n: lambda batch=batch: jax.block_until_ready(program(state, batch))
        for n, batch in batches.items()
    }


def _compare(
    settings: Settings,
    report: Report,
    name: str,
    search: dict[int, Callable[[], Any]],
    index: Any,
    queries: np.ndarray,
) -> None:
    calls: dict[tuple[str, str], Call] = {}
    for n in BATCHES:
        calls[f"{name}, {n} queries", OURS] = lambda i, n=n: search[n]()
        if index is not None:
            calls[f"{name}, {n} queries", FAISS] = lambda i, n=n: index.search(queries[:n], K)
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    if index is None:
        return
    for n in BATCHES:
        work = f"{name}, {n} queries"
        ratio = timings[work, FAISS].median / timings[work, OURS].median
        report.figure(f"top_k speed {work}", ratio, "x", f"{work}: speed over faiss", at_least=1)
    ours, theirs = np.asarray(search[BATCHES[-1]]()[1]), index.search(queries, K)[1]
    pairs = zip(ours, theirs, strict=True)
    shared = float(np.mean([len(np.intersect1d(*pair)) / K for pair in pairs]))
    meaning = f"{name}: share of the rows that faiss finds too"
    report.figure(f"top_k agreement {name}", shared, "", meaning)


def _train(settings: Settings, report: Report, queries: np.ndarray) -> None:
    factors = (10, 12, 14) if settings.quick else (200, 220, 250)
    shape = jax_tt.TTShape(int(np.prod(factors)), FEATURES, 16, factors, (4, 4, 4))
    table = jax_tt.tables.TTTable.of_shape(shape)
    search = _search(table, jax.jit(table.init)(jax.random.key(0)), queries)
    matmul, matmul_flops = numpy_matmul.matmul(256 if settings.quick else 2048)
    calls: dict[tuple[str, str], Call] = {MATMUL: matmul}
    calls |= {(TRAIN, f"{OURS}, {n} queries"): lambda i, n=n: search[n]() for n in BATCHES}
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    for n in BATCHES:
        floor = n * _train_flops(shape) * timings[MATMUL].median / matmul_flops
        ratio = timings[TRAIN, f"{OURS}, {n} queries"].median / floor
        meaning = f"{TRAIN}, {n} queries: over {1e3 * floor:.2f} ms of flops"
        report.figure(f"top_k over floor, train, {n} queries", ratio, "x", meaning, at_most=1.5)


def _train_flops(shape: jax_tt.TTShape) -> float:
    """Flops for a query: its product with each prefix of digits, from the product with the prefix before."""
    prefixes, columns, flops = 1, shape.features, 0
    for rows, width, left, right in zip(
        shape.row_factors,
        shape.col_factors,
        shape.full_ranks[:-1],
        shape.full_ranks[1:],
        strict=True,
    ):
        prefixes, columns = prefixes * rows, columns // width
        flops += 2 * prefixes * left * width * right * columns
    return float(flops)

"""Numpy float64 model of the ops and the table of cases that every implementation is held to."""

import contextlib
import math
import os
import shutil
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt._base import ffi
from jax_tt._formats.container import Container, read_container

# Compiled once for every table; outside of `jit` every operation would be.
to_dense = jax.jit(jax_tt.tables.to_dense, static_argnums=0)
# The variables that training changes.
TRAINED = nnx.Any(nnx.Param, jax_tt.FusedParam)

# name -> shape: 2 to 5 cores, odd ranks and factors, one column, slack rows, rank 1
SHAPES = {
    "d2": jax_tt.TTShape(50, 6, 3, (8, 7), (2, 3)),
    "d3": jax_tt.TTShape(120, 8, (4, 4), (4, 5, 6), (2, 2, 2)),
    "d3-odd": jax_tt.TTShape(100, 15, (3, 7), (3, 5, 7), (5, 1, 3)),
    "d3-one-column": jax_tt.TTShape(60, 1, (2, 3), (4, 4, 4), (1, 1, 1)),
    "d3-rank-one": jax_tt.TTShape(60, 4, 1, (3, 4, 5), (1, 2, 2)),
    "d4": jax_tt.TTShape(100, 12, (2, 5, 3), (3, 4, 3, 3), (2, 1, 3, 2)),
    "d5": jax_tt.TTShape(100, 6, (2, 3, 3, 2), (3, 2, 3, 2, 3), (1, 2, 1, 3, 1)),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-12}
COMBINERS = ("sum", "mean", "mean_count", "sqrtn", "max")
WEIGHTABLE = COMBINERS[:-1]


def on_gpu() -> bool:
    """Whether the test at hand runs on a GPU."""
    device = jax.config.jax_default_device
    return getattr(device, "platform", None) == "gpu"


def on_cpu() -> contextlib.AbstractContextManager[None]:
    """Where the CPU kernels say what a test on a GPU is to give; what is put into jit must not be committed."""
    return jax.default_device(jax.devices("cpu")[0])


def raises(method: str) -> bool:
    """Whether bad data stops the program; elsewhere it makes NaN."""
    return method == "native" and not on_gpu()


def skip_unless_stored(dtype: str, method: str) -> None:
    """Skips a test of a type that the kernels of a GPU do not store; `test_float64_is_refused` holds what they say."""
    if dtype == "float64" and (method == "cuda_emulated" or (method == "native" and on_gpu())):
        pytest.skip("the CUDA kernels store no float64")


def cxx_compiler() -> str:
    """The C++ compiler of this machine; skips the test where there is none."""
    names = ("c++", "g++", "clang++")
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@dataclass
class Case:
    """A table, ragged rows of ids with weights, and the gradient that comes from above."""

    shape: jax_tt.TTShape
    cores: tuple[jax.Array, ...]
    rows: list[list[int]]
    weights: list[list[float]] | None
    g: np.ndarray

    def bags(self, form: str = "ragged") -> jax_tt.Bags:
        if form == "ragged":
            capacity = sum(map(len, self.rows)) + 3
            return jax_tt.Bags.from_ragged(self.rows, self.weights, capacity=capacity)
        length = max(map(len, self.rows), default=0)
        ids = np.full((len(self.rows), length), -1, np.int32)
        weights = None if self.weights is None else np.full(ids.shape, 9.0, np.float32)
        for b, row in enumerate(self.rows):
            ids[b, : len(row)] = row
            if weights is not None and self.weights is not None:
                weights[b, : len(row)] = self.weights[b]
        return jax_tt.Bags.from_padded(ids, weights=weights)


def make_case(shape: jax_tt.TTShape, dtype: str, weighted: bool, seed: int = 0) -> Case:
    """Bags with duplicates, an empty one, the first and the last row."""
    rng = np.random.default_rng(seed)
    n = shape.num_embeddings
    cores = tuple(
        jnp.asarray(rng.normal(size=core) / math.sqrt(core[1])).astype(dtype)
        for core in shape.core_shapes
    )
    lengths = [3, 0, 1, 5, 0, 4]
    rows = [rng.integers(0, n, k).tolist() for k in lengths]
    rows[0] = [n - 1, 0, n - 1]
    rows[3][1] = rows[3][0]
    weights = None
    if weighted:
        # Exactly representable, so that float32 and float64 see the same numbers.
        weights = [(rng.integers(1, 9, k) / 4).tolist() for k in lengths]
    return Case(shape, cores, rows, weights, rng.normal(size=(len(rows), shape.features)))


def fused(
    start: Any, optimizer: Any, num_embeddings: int | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The fused table that starts as the given rows, or cores of a train, and its state."""
    update = jax_tt.Update(optimizer, **options)
    if isinstance(start, tuple):
        return jax_tt.tt.to_table(start, num_embeddings=num_embeddings, update=update)
    table, rows = jax_tt.tables.DenseTable.of(start, update)
    return table, {"embedding": rows, **table.init_rest({"embedding": rows})}


def f64(array: object) -> np.ndarray:
    return np.asarray(
        jnp.asarray(array).astype(jnp.float32) if _narrow(array) else array, np.float64
    )


def _narrow(array: object) -> bool:
    return np.asarray(array).dtype.itemsize == 2


def dense_table(cores: tuple[object, ...], num_embeddings: int) -> np.ndarray:
    """The table, contracted in float64."""
    value = np.ones((1, 1, 1))
    for core in cores:
        value = np.einsum("aqr,brst->abqst", value, f64(core))
        p, b, q, s, t = value.shape
        value = value.reshape(p * b, q * s, t)
    return value[:num_embeddings, :, 0]


def bag_model(
    table: np.ndarray,
    rows: list[list[int]],
    weights: list[list[float]] | None,
    combiner: str,
    g: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, list[list[float]]]:
    """Pooled rows, the gradient of the table, and of the weights, for ``sum(out * g)``."""
    out = np.zeros((len(rows), table.shape[1]))
    dtable = np.zeros_like(table)
    dweights: list[list[float]] = []
    for b, ids in enumerate(rows):
        if combiner == "max":
            if ids:
                column, at = np.arange(table.shape[1]), np.argmax(table[ids], axis=0)
                out[b] = table[ids][at, column]
                np.add.at(dtable, (np.asarray(ids)[at], column), g[b])
            continue
        w = np.ones(len(ids)) if weights is None else np.asarray(weights[b], np.float64)
        total = (w[:, None] * table[ids]).sum(0) if ids else np.zeros(table.shape[1])
        size = {
            "sum": 1.0,
            "mean": w.sum(),
            "mean_count": len(ids),
            "sqrtn": math.sqrt((w * w).sum()),
        }[combiner]
        inverse = 1 / size if size else 0.0
        out[b] = total * inverse
        np.add.at(dtable, np.asarray(ids, int), (w * inverse)[:, None] * g[b])
        along = table[ids] @ g[b] if ids else np.zeros(0)
        across = total @ g[b]
        slope = {"mean": 0 * w + inverse**2, "sqrtn": w * inverse**3}.get(combiner, 0 * w)
        dweights.append((along * inverse - across * slope).tolist())
    return out, dtable, dweights


def core_gradients(cores: tuple[object, ...], dtable: np.ndarray) -> list[np.ndarray]:
    """Gradients of the cores from that of the table, one contraction each."""
    arrays = [f64(core) for core in cores]
    d = len(arrays)
    p = [core.shape[0] for core in arrays]
    q = [core.shape[2] for core in arrays]
    full = np.zeros((math.prod(p), dtable.shape[1]))
    full[: dtable.shape[0]] = dtable
    letters = iter(string.ascii_letters)
    rows, cols = [next(letters) for _ in p], [next(letters) for _ in q]
    ranks = [next(letters) for _ in range(d + 1)]
    names = [rows[k] + ranks[k] + cols[k] + ranks[k + 1] for k in range(d)]
    table_name = "".join(rows + cols)
    gradients = []
    for k in range(d):
        others = [j for j in range(d) if j != k]
        expression = ",".join([table_name, *(names[j] for j in others)])
        operands = [full.reshape(*p, *q), *(arrays[j] for j in others)]
        # The outer ranks are 1, but einsum must not lose the letter of a core that is left out.
        edge = [ranks[0]] if k == 0 else [ranks[-1]] if k == d - 1 else []
        if edge:
            expression += "," + edge[0]
            operands.append(np.ones(1))
        gradients.append(np.einsum(f"{expression}->{names[k]}", *operands, optimize=True))
    return gradients


def assert_close(actual: object, expected: object, tolerance: float, what: str = "") -> None:
    """Maximum error relative to the largest expected value."""
    got, want = f64(actual), np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape} != {want.shape}"
    if got.size:
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
        assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def assert_same_bits(got: object, want: object) -> None:
    """Leaf by leaf, NaN and zeros of either sign included."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_same_in_any_order(run: Callable[[], object], orders: int = 3) -> object:
    """That emulated kernels give the same bits with their threads in several orders; what they give."""
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(str(ffi.why_unavailable("cuda_emulated")))
    results = []
    try:
        for seed in range(orders):
            module.set_seed(seed)
            results.append(jax.block_until_ready(run()))
    finally:
        module.set_seed(0)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    return results[0]


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([x for row in rows for x in row], np.float64)


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> int:
    """Changes the arrays and the notes of a container in place; returns its checksum, which fits them."""
    stored = read_container(str(path))
    arrays = {name: np.asarray(array.read()) for name, array in stored.arrays.items()}
    notes = dict(stored.notes)
    kind = notes.pop("kind")
    del notes["version"], notes["checksums"]
    change(arrays, notes)
    container = Container(kind, arrays, notes)
    container.write(str(path))
    return container.checksum

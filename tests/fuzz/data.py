"""Compiled calls with hostile contents: each must raise a JAX error, or return what numpy says, or at least numbers.

A call is judged by an oracle in numpy that knows which contents must be refused. Every few calls a *canary*, a valid
call with contents of its own, must return the same bits as the first time: memory that a hostile call damaged would
show there.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt import optimizers
from tests.helpers import SHAPES

BAGS, CAPACITY, LENGTH = 5, 16, 4
REFUSALS = ("OUT_OF_RANGE: ", "INVALID_ARGUMENT: ")
TABLES = SHAPES | {
    "4e9": jax_tt.TTShape(4_000_000_000, 8, 2, (1600, 1600, 1600), (2, 2, 2)),
    "2^32": jax_tt.TTShape(2**32, 4, 2, (2**16, 2**16), (2, 2)),
    "1e12": jax_tt.TTShape(10**12, 8, 2, (252,) * 5, (2, 1, 2, 1, 2)),
}
DENSE = {"dense": (50, 6), "dense-one": (1, 1), "dense-wide": (7, 1100)}


@dataclasses.dataclass(frozen=True)
class Signature:
    """What is compiled once; the contents vary."""

    table: str
    form: str = "ragged"  # lookup, ragged, rectangle or padded
    ids: str = "int32"  # or uint32, int64, digits
    bounds: str = "error"
    dtype: str = "float32"
    weighted: bool = False
    combiner: str = "sum"
    rule: Any = None
    donate: bool = False

    @property
    def x64(self) -> bool:
        return self.ids == "int64" or self.dtype == "float64"

    @property
    def num_embeddings(self) -> int:
        return DENSE[self.table][0] if self.table in DENSE else TABLES[self.table].num_embeddings


CANARY_EVERY = 16
S = Signature
ADAGRAD, ROW_WISE = optimizers.Adagrad(0.1), optimizers.RowWiseAdagrad(0.1)
ADAM = optimizers.Adam(0.01)
SIGNATURES = (
    S("d2"),
    S("d2", "rectangle", "uint32", "clip", weighted=True),
    S("d2", "padded", "digits", "zero", weighted=True, combiner="sqrtn"),
    S("d3", "lookup"),
    S("d3", "ragged", "int64", "clip", dtype="float64", weighted=True, combiner="mean"),
    S("d3", "padded", "int32", "warn", dtype="bfloat16", combiner="mean"),
    S("d3", "ragged", "digits", "error", weighted=True),
    S("d3", "ragged", "int32", "unchecked", weighted=True),
    S("d3", "rectangle", "uint32", "error", dtype="float16"),
    S("d3-odd", "ragged", "int32", "zero", weighted=True),
    S("d3-odd", "lookup", "int64", "error"),
    S("d3-one-column", "padded", "uint32", "clip", weighted=True, combiner="sqrtn"),
    S("d4", "ragged", "digits", "clip", combiner="sqrtn"),
    S("d4", "lookup", "digits", "unchecked"),
    S("d5", "ragged", "int32", "error", weighted=True, combiner="mean"),
    S("d5", "padded", "int64", "unchecked", weighted=True),
    S("4e9", "lookup", "uint32", "error"),
    S("2^32", "ragged", "uint32", "warn", weighted=True),
    S("2^32", "padded", "int64", "clip"),
    S("1e12", "ragged", "digits", "error", weighted=True),
    S("1e12", "lookup", "int64", "zero"),
    S("dense", "ragged", "int32", "error", weighted=True),
    S("dense", "padded", "int64", "warn", combiner="mean"),
    S("dense-one", "ragged", "uint32", "clip", weighted=True),
    S("dense-wide", "rectangle", "int32", "unchecked", dtype="bfloat16"),
    S("d3", "ragged", "int32", "error", weighted=True, rule=optimizers.SGD(1.0)),
    S("d3", "padded", "digits", "clip", rule=ADAM, donate=True),
    S("d4", "lookup", "uint32", "warn", rule=ROW_WISE),
    S("d3", "ragged", "int32", "clip", dtype="bfloat16", rule=ADAGRAD, donate=True),
    S("1e12", "ragged", "digits", "error", weighted=True, rule=ADAGRAD, donate=True),
    S("dense", "ragged", "int32", "error", weighted=True, rule=ADAM, donate=True),
    S("dense-wide", "padded", "int32", "zero", dtype="float16", rule=ROW_WISE),
)


@dataclasses.dataclass
class Contents:
    """Arrays of one call. ``digits`` are None unless the ids come split."""

    ids: np.ndarray
    digits: np.ndarray | None
    offsets: np.ndarray | None
    weights: np.ndarray | None
    sentinel: float = 1.0


def _table_of(signature: Signature, arrays: list[jax.Array]) -> tuple[Any, dict[str, Any]]:
    update = None if signature.rule is None else jax_tt.Update(signature.rule)
    fields = {"param_dtype": arrays[0].dtype, "update": update, "name": "t"}
    if signature.table in DENSE:
        table: Any = jax_tt.tables.DenseTable(*DENSE[signature.table], **fields)
    else:
        table = jax_tt.tables.TTTable.of_shape(TABLES[signature.table], **fields)
    params = dict(zip(table.spec.param_names, arrays, strict=True))
    return table, params | table.init_rest(params)


_targets: dict[int, Target] = {}


def one(rng: np.random.Generator) -> str:
    """One call of some signature: ``"raised"``, ``"returned"``, or ``"checked"`` by value."""
    which = int(rng.integers(len(SIGNATURES)))
    if which not in _targets:
        _targets[which] = Target(SIGNATURES[which])
    try:
        return _targets[which].call(rng)
    except AssertionError as error:
        raise AssertionError(f"{SIGNATURES[which]}: {error}") from error


class Target:
    """One compiled signature."""

    def __init__(self, signature: Signature):
        self.signature = signature
        rng = np.random.default_rng(len(repr(signature)))
        shapes = (
            [DENSE[signature.table]]
            if signature.table in DENSE
            else TABLES[signature.table].core_shapes
        )
        with jax.enable_x64(signature.x64):
            cores = [
                jnp.asarray(rng.normal(size=shape) / 2).astype(signature.dtype) for shape in shapes
            ]
            self.table, self.state = _table_of(signature, cores)
        self.wide = [np.asarray(core.astype(jnp.float32), np.float64) for core in cores]
        self.compiled = jax.jit(self._step, donate_argnums=(0,) if signature.donate else ())
        self.calls = 0
        self.canary = self._contents(np.random.default_rng(1), hostile=False)
        self.expected: list[bytes] | None = None

    def check_canary(self) -> None:
        result = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(self.run(self.canary))]
        if self.expected is None:
            self.expected = result
        assert result == self.expected, "a valid call no longer returns what it returned at first"

    def run(self, contents: Contents) -> Any:
        """Output and gradients (or new table) as the compiled call returns them."""
        with jax.enable_x64(self.signature.x64):
            state = self.state
            if self.signature.rule is not None:
                state = state | {"sentinel": np.float32(contents.sentinel)}
            if self.signature.donate:
                state = jax.tree.map(jnp.array, state)
            ids = contents.ids if contents.digits is None else contents.digits
            return jax.block_until_ready(
                self.compiled(state, contents.weights, ids, contents.offsets)
            )

    def call(self, rng: np.random.Generator) -> str:
        """One call with random contents; ``"raised"``, ``"returned"`` or ``"checked"`` by value."""
        if self.calls % CANARY_EVERY == 0:
            self.check_canary()
        self.calls += 1
        contents = self._contents(rng, hostile=rng.random() < 0.85)
        must_raise, want = self._oracle(contents)
        try:
            (_, out), gradients = self.run(contents)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            assert must_raise, f"refused although valid: {error}"
            assert str(error).startswith(REFUSALS), f"an error of another kind: {error}"
            return "raised"
        assert not must_raise, "accepted although it had to be refused"
        if want is None:
            return "returned"
        self._compare(contents, np.asarray(out).astype(np.float64), want, gradients)
        return "checked"

    def _step(self, state: Any, weights: Any, ids: Any, offsets: Any) -> Any:
        s = self.signature
        if s.ids == "digits":
            ids = jax_tt.SplitIds(ids)

        def loss(state: Any, weights: Any) -> Any:
            lookup = jax_tt.Lookup(s.combiner, s.bounds, method="native")
            if s.form == "lookup":
                out, _ = jax_tt.lookup(self.table, state, ids, lookup)
            else:
                bags = jax_tt.Bags(ids, offsets, weights, s.form == "padded")
                out, _ = jax_tt.lookup_bags(self.table, state, bags, lookup)
            return jnp.sum(out.astype(jnp.float32)), out

        argnums = (0, 1) if s.weighted else (0,)
        return jax.value_and_grad(loss, argnums=argnums, has_aux=True)(state, weights)

    def _contents(self, rng: np.random.Generator, hostile: bool) -> Contents:
        s = self.signature
        shape = {"lookup": (2, 7), "ragged": (CAPACITY,)}.get(s.form, (BAGS, LENGTH))
        dtype = np.dtype(np.int64 if s.ids == "digits" else s.ids)
        wild = hostile and rng.random() < 0.6
        ids = _ids(
            rng, shape, dtype, s.num_embeddings, rng.choice([0.05, 0.3, 1.0]) if wild else 0.0
        )
        if s.form == "padded":
            ids = np.where(rng.random(shape) < 0.3, np.array(-1).astype(dtype), ids)
        digits = None
        if s.ids == "digits":
            table = TABLES[s.table]
            digits = np.array(table.split_ids(ids).digits)
            if wild and rng.random() < 0.5:
                mixed = rng.random(digits.shape) < 0.2
                digits = np.where(
                    mixed, _ids(rng, digits.shape, np.dtype(np.int32), 8, 0.7), digits
                )
        offsets = None
        if s.form == "ragged":
            offsets = np.sort(rng.integers(0, CAPACITY + 1, BAGS + 1)).astype(np.int32)
            offsets[0] = 0
            if hostile and rng.random() < 0.3:
                offsets = _bad_offsets(rng, offsets)
        weights = None
        if s.weighted:
            weights = rng.integers(-8, 9, shape).astype(np.float32) / 4
            if hostile and rng.random() < 0.3:
                special = np.float32([0, np.inf, -np.inf, np.nan, 3e38, 1e-45, 1e30])
                weights = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), weights)
        moved = s.rule is not None and hostile and rng.random() < 0.1
        sentinel = float(rng.choice([0, 2, np.nan, np.inf, 0.999])) if moved else 1.0
        return Contents(ids, digits, offsets, weights, sentinel)

    def _oracle(self, c: Contents) -> tuple[bool, np.ndarray | None]:
        """Whether the call must be refused, and the sums otherwise (None: any numbers will do)."""
        s, o = self.signature, c.offsets
        if c.sentinel != 1:
            return True, None
        if o is not None and (
            o[0] != 0 or np.any(np.diff(o.astype(np.int64)) < 0) or o[-1] > CAPACITY
        ):
            if s.bounds in ("error", "unchecked"):
                return True, None
            o = np.maximum.accumulate(np.clip(np.concatenate([[0], o[1:]]), 0, CAPACITY))
        if o is None:
            count = 1 if s.form == "lookup" else LENGTH
            ends = np.arange(0, c.ids.size + 1, count)
        else:
            ends = o
        positions = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
        used = np.concatenate([np.zeros(0, int), *positions])
        ids, digits, ordinary = self._digits(c)
        padding = np.zeros(ids.shape, bool)
        if s.form == "padded":
            padding = (
                ids == -1
                if c.digits is not None
                else c.ids.ravel() == np.array(-1).astype(c.ids.dtype)
            )
        inside = (ids >= 0) & (ids < s.num_embeddings)
        if s.bounds == "error" and np.any(~inside[used] & ~padding[used]):
            return True, None
        if s.bounds in ("clip", "unchecked") and not np.all(ordinary[used] | padding[used]):
            return False, None
        rows = self._rows(digits)
        rows[padding | (~inside if s.bounds in ("zero", "warn") else False)] = 0
        weights = np.ones(ids.shape) if c.weights is None else c.weights.ravel().astype(np.float64)
        # Neither weights whose squares leave float32 nor NaN.
        sizes = np.abs(weights[used][~padding[used]])
        if not np.all((sizes < 1e3) & ((sizes == 0) | (sizes > 1e-3))):
            return False, None
        weights = np.where(padding, 0, weights)
        out = np.zeros((len(positions), rows.shape[1]))
        for b, where in enumerate(positions):
            w = weights[where]
            size = {"sum": 1, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[s.combiner]
            out[b] = (w[:, None] * rows[where]).sum(0) / size if size else 0
        return False, out

    def _digits(self, c: Contents) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids in range or -1 / -2, their digits clamped to the table, and whether clamping has one meaning."""
        n = self.signature.num_embeddings
        if c.digits is None:
            ids = np.array([int(i) for i in c.ids.ravel()], object)
            inside = np.array([0 <= i < n for i in ids], bool)
            clamped = np.array([min(max(i, 0), n - 1) for i in ids], np.int64)
            result = np.where(inside, clamped, -2)
            ordinary = np.ones(ids.shape, bool)
        else:
            factors = np.array(TABLES[self.signature.table].row_factors)
            digits = c.digits.reshape(-1, len(factors)).astype(np.int64)
            proper = np.all((digits >= 0) & (digits < factors), 1)
            value = np.zeros(len(digits), np.int64)
            for k, factor in enumerate(factors):
                value = value * factor + np.where(proper, digits[:, k], 0)
            result = np.where(
                proper & (value < n), value, np.where(np.all(digits == -1, 1), -1, -2)
            )
            large = proper | np.all(digits == factors, 1)
            ordinary = large | (result == -1)
            clamped = np.where(result >= 0, result, np.where(large, n - 1, 0))
        if self.signature.table in DENSE:
            return result, clamped[:, None], ordinary
        shape = TABLES[self.signature.table].row_factors
        return result, np.stack(np.unravel_index(clamped, shape), 1), ordinary

    def _rows(self, digits: np.ndarray) -> np.ndarray:
        if len(self.wide) == 1:
            return self.wide[0][digits[:, 0]].copy()
        value = np.ones((len(digits), 1, 1))
        for core, digit in zip(self.wide, digits.T, strict=True):
            value = np.einsum("nar,nrbt->nabt", value, core[digit])
            value = value.reshape(len(digits), -1, core.shape[3])
        return value[:, :, 0]

    def _compare(self, c: Contents, out: np.ndarray, want: np.ndarray, gradients: Any) -> None:
        s = self.signature
        tolerance = 1e-4 if s.dtype in ("float32", "float64") else 3e-2
        scale = max(np.abs(want).max(initial=0), 1.0)
        error = np.abs(out.reshape(want.shape) - want).max(initial=0)
        # A mean over weights that nearly cancel magnifies the rounding of each of them.
        assert error <= tolerance * scale, f"wrong by {error:.2e} of {scale:.2e}"
        if s.rule is not None or s.dtype not in ("float32", "float64"):
            return
        # The output is linear in each core: the core times its gradient is the sum of the output.
        for core, gradient in zip(self.wide, jax.tree.leaves(gradients[0]), strict=True):
            total = float(np.sum(core * np.asarray(gradient, np.float64)))
            spread = float(np.sum(np.abs(core * np.asarray(gradient, np.float64)))) + scale
            assert abs(total - want.sum()) <= 1e-4 * spread, f"gradient: {total} for {want.sum()}"


def _ids(rng: np.random.Generator, shape: Any, dtype: np.dtype, n: int, wild: float) -> np.ndarray:
    """Ids below ``n``, of which the share ``wild`` may be anything that the type holds."""
    info = np.iinfo(dtype)
    valid = rng.integers(0, min(n, info.max), shape, dtype=dtype)
    if not wild:
        return valid
    anywhere = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    edges = [
        v for v in (-2, -1, 0, n - 1, n, n + 1, info.min, info.max) if info.min <= v <= info.max
    ]
    edge = rng.choice(np.array(edges, dtype), shape)
    strange = np.where(rng.random(shape) < 0.5, anywhere, edge)
    return np.where(rng.random(shape) < wild, strange, valid)


def _bad_offsets(rng: np.random.Generator, offsets: np.ndarray) -> np.ndarray:
    kind = rng.integers(4)
    if kind == 0:
        return rng.permutation(offsets)
    if kind == 1:
        return rng.integers(-(2**31), 2**31, offsets.shape).astype(np.int32)
    offsets = offsets.copy()
    edges = np.array([-1, 1, CAPACITY, CAPACITY + 1, 2**31 - 1, -(2**31)], np.int32)
    offsets[rng.integers(len(offsets))] = rng.choice(edges)
    return offsets if kind == 2 else offsets + rng.integers(-2, 3).astype(np.int32)

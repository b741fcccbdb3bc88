"""Calls of FFI targets with valid arguments, as the library makes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt import optimizers
from jax_tt._base import ffi

SHAPES = (  # row factors, column factors, ranks, num_embeddings
    ((8, 7), (2, 3), (1, 3, 1), 50),
    ((4, 5, 6), (2, 2, 2), (1, 4, 4, 1), 120),
    ((3, 4, 3, 3), (2, 1, 3, 2), (1, 2, 5, 3, 1), 100),
    ((3, 2, 3, 2, 3), (1, 2, 1, 3, 1), (1, 2, 3, 3, 2, 1), 100),
)
DTYPES = ("float32", "float64", "bfloat16", "float16")
BOUNDS = ("clip", "zero", "error", "unchecked", "poison", "warn")


@dataclasses.dataclass
class Call:
    target: str
    args: list[np.ndarray]
    results: list[jax.ShapeDtypeStruct]
    attributes: dict[str, Any]
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        call = jax.ffi.ffi_call(
            self.target,
            tuple(self.results),
            input_output_aliases=self.aliases,
            has_side_effect=True,
        )
        jax.block_until_ready(call(*self.args, **self.attributes))


@functools.cache
def _sizes(which: int, n: int) -> tuple[int, int]:
    module = ffi.load("cpu")
    assert module is not None
    p, q, r, rows = SHAPES[which]
    return module.plan_size(p, q, r, rows, n, n)


def _lookups(
    rng: np.random.Generator, rows: int, split: tuple[int, ...] | None
) -> list[np.ndarray]:
    """ids [G, n / G] or digits [G, n / G, d], and offsets [G, B + 1]."""
    groups, bags, capacity = rng.integers(1, 4), rng.integers(0, 4), rng.integers(0, 7)
    ids = rng.integers(0, rows, (groups, capacity)).astype(rng.choice(["int32", "uint32", "int64"]))
    if split is not None:
        ids = np.stack(np.unravel_index(ids.astype(np.int64), split), -1).astype(np.int32)
    offsets = np.sort(rng.integers(0, capacity + 1, (groups, bags + 1)), -1).astype(np.int32)
    offsets[:, 0] = 0
    return [ids, offsets]


def _table_attributes(which: int) -> dict[str, Any]:
    p, q, r, rows = SHAPES[which]
    return {
        "row_factors": _i64(p),
        "col_factors": _i64(q),
        "ranks": _i64(r),
        "num_embeddings": _i64(rows),
    }


def _lookup_attributes(rng: np.random.Generator, split: bool) -> dict[str, Any]:
    return {
        "split": split,
        "padded": bool(rng.integers(2)),
        "bounds": str(rng.choice(BOUNDS)),
        "table": "t",
    }


def _step_attributes(rng: np.random.Generator, rule: str) -> dict[str, Any]:
    return {
        "optimizer": rule,
        "skip_nonfinite": bool(rng.integers(2)),
        "stochastic_rounding": bool(rng.integers(2)),
    }


def _plan(rng: np.random.Generator, which: int) -> tuple[Call, int]:
    """The call that makes a plan, and its number of positions."""
    p, _, _, rows = SHAPES[which]
    split = bool(rng.integers(2))
    ids, offsets = _lookups(rng, rows, p if split else None)
    n = int(np.prod(ids.shape[:2]))
    attributes = _table_attributes(which) | _lookup_attributes(rng, split) | {"hint": _i64(n)}
    results = [result_type((_sizes(which, n)[0],), "int32")]
    return Call("jax_tt_plan_v1", [ids, offsets, np.float32(1)], results, attributes), n


def _cores(rng: np.random.Generator, which: int, dtype: Any) -> list[np.ndarray]:
    p, q, r, _ = SHAPES[which]
    shapes = [(p[k], r[k], q[k], r[k + 1]) for k in range(len(p))]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def _slots(rule: str, tables: list[np.ndarray]) -> list[np.ndarray]:
    known, shapes = _known(rule), []
    for table in tables:
        n = table.shape[0]
        shapes += [(n, table.size // n)] * known.entry_slots + [(n,)] * known.row_slots
    return [np.ones(shape, _accum(tables[0].dtype)) for shape in shapes]


def _step(rule: str, accum: Any) -> list[np.ndarray]:
    hyper = np.full(len(_known(rule).hyperparameters), 0.5, accum)
    return [hyper, np.ones(2, accum), np.zeros(2, np.uint32)]


def _known(rule: str) -> ffi.Rule:
    found = ffi.rule("cpu", rule)
    assert found is not None
    return found


def _accum(dtype: Any) -> Any:
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def _rule(rng: np.random.Generator) -> str:
    return str(rng.choice(list(optimizers.RULES)))


def build_plan(rng: np.random.Generator) -> Call:
    return _plan(rng, int(rng.integers(len(SHAPES))))[0]


@dataclasses.dataclass
class Planned:
    """What the consumers of a plan have in common."""

    which: int
    accum: Any
    batch: list[np.ndarray]  # ids, offsets, weights, plan, saved products, output gradient
    cores: list[np.ndarray]
    positions: int
    attributes: dict[str, Any]

    def weightsresult_type(self, rng: np.random.Generator) -> jax.ShapeDtypeStruct:
        return result_type((self.positions if rng.integers(2) else 0,), self.accum)


def _planned(rng: np.random.Generator) -> Planned:
    which = int(rng.integers(len(SHAPES)))
    dtype = jnp.dtype(rng.choice(DTYPES))
    accum = _accum(dtype)
    call, n = _plan(rng, which)
    ids, offsets, _ = call.args
    (plan,) = jax.ffi.ffi_call(call.target, tuple(call.results))(*call.args, **call.attributes)
    weights = np.ones(n if rng.integers(2) else 0, accum)
    saved = n * _sizes(which, n)[1] if rng.integers(2) and accum == jnp.float32 else 0
    out = (*offsets.shape[:-1], offsets.shape[-1] - 1, int(np.prod(SHAPES[which][1])))
    batch = [ids, offsets, weights, np.asarray(plan), np.zeros(saved, accum), np.ones(out, accum)]
    return Planned(which, accum, batch, _cores(rng, which, dtype), n, call.attributes)


def _forward(rng: np.random.Generator) -> Call:
    given = _planned(rng)
    ids, offsets, weights, plan, saved, g = given.batch
    results = [
        result_type(g.shape, given.accum),
        result_type(plan.shape if rng.integers(2) else (0,), "int32"),
        result_type(saved.shape, given.accum),
    ]
    args = [ids, offsets, weights, np.float32(1), *given.cores]
    return Call("", args, results, given.attributes)


def build_cache_forward(rng: np.random.Generator) -> Call:
    given = _planned(rng)
    ids, offsets, weights, plan, saved, g = given.batch
    attributes = given.attributes | {"padded": True}
    slots = rng.integers(-1, 9, given.positions).astype(np.int32)
    ids = np.array(ids)
    ids[slots.reshape(ids.shape[:2]) >= 0] = np.array(-1).astype(ids.dtype)
    wide = given.accum == jnp.float64
    storage = jnp.dtype("float64" if wide else rng.choice(["float32", "bfloat16", "float16"]))
    rows = rng.normal(size=(9, g.shape[-1])).astype(storage)
    one = np.float32(1)
    args = [slots, rows, one, ids, offsets, weights, one, *given.cores]
    like = (g, ids, offsets, weights)
    results = [result_type(a.shape, a.dtype) for a in like]
    results += [result_type(weights.shape, "int32"), result_type(plan.shape, "int32")]
    results += [result_type(saved.shape, given.accum)]
    return Call("jax_tt_cache_forward_v1", args, results, attributes)


def _backward(rng: np.random.Generator) -> Call:
    given = _planned(rng)
    results = [result_type((sum(SHAPES[given.which][0]),), "int32"), given.weightsresult_type(rng)]
    results += [result_type(core.shape, given.accum) for core in given.cores]
    return Call("", [*given.batch, *given.cores], results, given.attributes)


def _update(rng: np.random.Generator) -> Call:
    given = _planned(rng)
    rule = _rule(rng)
    tables = [*given.cores, *_slots(rule, given.cores)]
    args = [np.zeros_like(given.batch[-1]), *given.batch, *_step(rule, given.accum)]
    attributes = given.attributes | _step_attributes(rng, rule)
    results = [result_type((), "float32"), given.weightsresult_type(rng)]
    return _in_place(args, tables, results, attributes)


def _apply(rng: np.random.Generator) -> Call:
    """A step whose gradients are there already."""
    which = int(rng.integers(len(SHAPES)))
    dtype = jnp.dtype(rng.choice(DTYPES))
    cores = _cores(rng, which, dtype)
    gradients = _cores(rng, which, _accum(dtype))
    rule = _rule(rng)
    args = [np.ones(sum(SHAPES[which][0]), np.int32), *_step(rule, _accum(dtype))]
    tables = [*cores, *_slots(rule, cores)]
    attributes = _table_attributes(which) | _step_attributes(rng, rule)
    own = _in_place(args, tables, [result_type((), "float32")], attributes)
    own.args += gradients
    return own


def _dense(rng: np.random.Generator) -> tuple[Any, np.ndarray, list[np.ndarray], np.ndarray]:
    """Arithmetic type, table, ids + offsets + weights, out gradient."""
    dtype = jnp.dtype(rng.choice(DTYPES))
    accum = _accum(dtype)
    table = rng.normal(size=(rng.integers(1, 9), rng.integers(1, 40))).astype(dtype)
    ids, offsets = _lookups(rng, table.shape[0], None)
    weights = np.ones(ids.size if rng.integers(2) else 0, accum)
    g = np.ones((*offsets.shape[:-1], offsets.shape[-1] - 1, table.shape[1]), accum)
    return accum, table, [ids, offsets, weights], g


def _dense_forward(rng: np.random.Generator) -> Call:
    accum, table, lookups, g = _dense(rng)
    attributes = _lookup_attributes(rng, False)
    if rng.integers(2):
        table, of_rows = _packed(rng, table)
        accum, attributes = "float32", attributes | of_rows
        lookups[2] = lookups[2].astype(accum)
    args = [*lookups, np.float32(1), table]
    return Call("", args, [result_type(g.shape, accum)], attributes)


def _coded_forward(rng: np.random.Generator) -> Call:
    parts, terms, bits, width = (int(rng.integers(1, most)) for most in (6, 4, 11, 9))
    hot_terms, hot = (int(rng.integers(most)) for most in (3, 9))
    _, table, lookups, g = _dense(rng)
    rows = len(table)
    code_bytes = lambda terms: -(-parts * terms * bits // 8)  # noqa: E731
    codes = rng.integers(0, 256, (rows, code_bytes(terms)), np.uint8)
    hot_codes = rng.integers(0, 256, (hot, code_bytes(hot_terms)), np.uint8)
    # Blocks may say that any number of rows comes before them.
    places = rng.integers(0, 1 << 32, (-(-rows // 512), 17), np.uint32) >> np.uint32(
        rng.integers(32)
    )
    codebooks = rng.normal(size=(parts * (terms + hot_terms) << bits, width)).astype("float32")
    sizes = {"bits": bits, "terms": terms, "hot_terms": hot_terms}
    weights = lookups[2].astype("float32")
    return Call(
        "",
        [*lookups[:2], weights, np.float32(1), codes, hot_codes, places, codebooks],
        [result_type((*g.shape[:-1], parts * width), "float32")],
        _lookup_attributes(rng, False) | {name: _i64(size) for name, size in sizes.items()},
    )


def _packed(rng: np.random.Generator, table: np.ndarray) -> tuple[np.ndarray, dict]:
    """Rows of a quantized table of this shape, and their attributes."""
    (rows, features), bits = table.shape, int(rng.choice([8, 4, 3, 2]))
    packed = rng.integers(0, 256, (rows, 4 + -(-features * bits // 8)), np.uint8)
    levels = np.sort(rng.choice(8192, 1 << bits, replace=False)) if rng.integers(2) else []
    own = {"levels": " ".join(map(str, levels))} if len(levels) and bits < 8 else {}
    return packed, {"bits": _i64(bits), "dim": _i64(features), **own}


def _dense_backward(rng: np.random.Generator) -> Call:
    accum, table, lookups, g = _dense(rng)
    wanted = lookups[0].size if rng.integers(2) else 0
    results = [result_type((wanted,), accum), result_type(table.shape, accum)]
    return Call("", [*lookups, g, table], results, _lookup_attributes(rng, False))


def _dense_update(rng: np.random.Generator) -> Call:
    accum, table, lookups, g = _dense(rng)
    rule = _rule(rng)
    tables = [table, *_slots(rule, [table])]
    args = [np.zeros(g.shape, accum), *lookups, g, *_step(rule, accum)]
    attributes = _lookup_attributes(rng, False) | _step_attributes(rng, rule)
    results = [
        result_type((), "float32"),
        result_type((lookups[0].size if rng.integers(2) else 0,), accum),
    ]
    return _in_place(args, tables, results, attributes)


def build_dense(rng: np.random.Generator) -> Call:
    """One of the three above on up to three tables."""
    op = str(rng.choice(["forward", "backward", "update"]))
    build = {"forward": _dense_forward, "backward": _dense_backward, "update": _dense_update}
    whole = _whole(f"dense_{op}")
    whole.attributes["columns"] = _i64([])
    wide = bool(rng.integers(2))
    parts = [build[op](rng) for _ in range(1 if wide else rng.integers(1, 4))]
    if op == "update":
        parts = _with_common_steps(whole, parts, 5)
    if wide:
        return _in_one_array(rng, op, whole, parts[0])
    return one_after_another(whole, parts)


def build_trains(rng: np.random.Generator) -> Call:
    """An op on up to three TT tables."""
    build = {"forward": _forward, "backward": _backward, "update": _update, "apply": _apply}
    op = str(rng.choice(list(build)))
    whole = _whole(op)
    parts = [build[op](rng) for _ in range(rng.integers(1, 4))]
    for own in parts:
        attributes = dict(own.attributes)
        cores = _i64(len(attributes.pop("row_factors")))
        del attributes["col_factors"], attributes["ranks"]
        own.attributes = attributes | {"cores": cores}
    if op in ("update", "apply"):
        parts = _with_common_steps(whole, parts, 7 if op == "update" else 1)
    return one_after_another(whole, parts)


def build_coded(rng: np.random.Generator) -> Call:
    parts = [_coded_forward(rng) for _ in range(rng.integers(1, 4))]
    return one_after_another(_whole("coded_forward"), parts)


def _whole(op: str) -> Call:
    """A call without tables."""
    return Call(f"jax_tt_{op}_v1", [], [], {"caller": "a test"})


def one_after_another(whole: Call, parts: list[Call]) -> Call:
    """The call of ``whole`` on what all the parts are called with."""
    for k, own in enumerate(parts):
        before = len(whole.args), len(whole.results)
        whole.aliases |= {before[0] + a: before[1] + r for a, r in own.aliases.items()}
        whole.args += own.args
        whole.results += own.results
        whole.attributes[str(k)] = own.attributes
    return whole


def _with_common_steps(whole: Call, parts: list[Call], first: int) -> list[Call]:
    """Updates whose hyper-parameters, scales and seeds, and whether they were applied, are one array of all tables.

    The hyper-parameters are the argument ``first`` of an update. Those of another type than the first have no part.
    """
    parts = [own for own in parts if own.args[first].dtype == parts[0].args[first].dtype]
    for k in range(first, first + 3):
        whole.args.append(np.concatenate([own.args[k] for own in parts]))
    whole.results.append(result_type((len(parts),), "float32"))
    return [
        Call(
            own.target,
            own.args[:first] + own.args[first + 3 :],
            own.results[1:],
            own.attributes,
            {a - 3: r - 1 for a, r in own.aliases.items()},
        )
        for own in parts
    ]


def _in_one_array(rng: np.random.Generator, op: str, whole: Call, own: Call) -> Call:
    """The call on one table whose vectors of bags are columns of an array, once or as two features."""
    args, results, narrow = list(own.args), list(own.results), own.results[0].shape
    if op == "update":
        narrow = args[0].shape
        del args[4], args[0]
    elif op == "backward":
        narrow = args[3].shape
        del args[3]
    bags, features = int(np.prod(narrow[:-1])), 1
    if bags % 2 == 0:
        features = int(rng.integers(1, 3))
    columns = [int(rng.integers(3)) + k * narrow[-1] for k in range(features)]
    shape = bags // features, columns[-1] + narrow[-1] + int(rng.integers(2))
    accum = own.results[0].dtype if op == "forward" else args[2].dtype
    arrays = [np.ones(shape, accum)] * {"forward": 0, "backward": 1, "update": 2}[op]
    if op == "forward":
        results = [result_type(shape, accum), *results[1:]]
    before = len(whole.args), len(whole.results)
    whole.aliases |= {before[0] + a: before[1] + r for a, r in own.aliases.items()}
    whole.args += arrays + args
    whole.results += results
    whole.attributes |= {
        "0": own.attributes | {"features": _i64(features)},
        "columns": _i64(columns),
    }
    return whole


def _in_place(args: list[Any], tables: list[Any], results: list[Any], attributes: Any) -> Call:
    aliases = {len(args) + i: len(results) + i for i in range(len(tables))}
    results = results + [result_type(t.shape, t.dtype) for t in tables]
    return Call("", args + tables, results, attributes, aliases)


def result_type(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(int(size) for size in shape), jnp.dtype(dtype))


def _i64(value: Any) -> Any:
    return np.asarray(value, np.int64) if np.ndim(value) else np.int64(value)


BUILDERS: tuple[Callable[[np.random.Generator], Call], ...] = (
    build_plan, build_cache_forward, build_trains, build_dense, build_coded
)  # fmt: skip

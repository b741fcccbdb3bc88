"""Malformed arguments of the public functions: a ValueError or TypeError that names the argument, or a result.

Calls are traced, not run. A mutation that can only be wrong must raise; one that may be right by luck may return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_tt
from jax_tt import optimizers
from tests.helpers import SHAPES, fused

SHAPE = SHAPES["d3"]
N, D = SHAPE.num_embeddings, SHAPE.features


def plain_sgd(
    rows: jax.Array, gradients: jax.Array, slots: dict[str, jax.Array], step: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The rule of `optimizers.Custom` below."""
    del step
    return rows - 0.1 * gradients, slots


RULES = (
    optimizers.SGD(0.1),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
    optimizers.Custom(plain_sgd),
)


# What a slip can pass, and what nobody would: of the latter only the type of the error is held to.
SLIPS: tuple[Any, ...] = (
    "x", 3.5, float("nan"), [], (), [[1], [2, 3]], -1, 0, 2**70, -(2**70), np.array("a"), np.float32(2),
    np.zeros((2, 2, 2, 2, 2)), None
)  # fmt: skip
EXOTIC: tuple[Any, ...] = (
    b"x", 2j, {}, set(), object(), type, np.array([1, None]), ..., range(3), True
)  # fmt: skip


# What an argument is, where that is not its name.
KINDS = {
    "num_embeddings": "rows", "combiner": "word", "init": "word", "grad_scale": "scale", "features": "size",
    "d": "size", "row_factors": "sizes", "col_factors": "sizes", "rows": "nested", "pad_id": "pad",
    "lengths": "offsets", "learning_rate": "number", "b1": "number", "b2": "number", "eps": "number"
}  # fmt: skip


class Case:
    """A function, its arguments, and per argument what it is; ``others`` are no `KINDS`."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], **others: str):
        self.function, self.arguments = function, arguments
        self.kinds = {name: others.get(name) or KINDS.get(name, name) for name in arguments}


# How an error may call an argument beside its own name; numpy and JAX report some themselves.
ALIASES = {
    "bags": ("ids", "offsets", "weights"),
    "ids_or_bags": ("ids", "bags", "offsets", "weights", "num_embeddings"),
    "num_embeddings": ("rows",),
    "dtype": ("data type", "type"),
    "learning_rate": ("optimizer",),
    "table": ("cores",),
    "state": ("core_", "embedding", "slot_", "step", "sentinel", "used", "parameters"),
    "cores": ("num_embeddings", "features", "query"),
    "axis_name": ("axis",),
    "shape": ("TTShape",),
    "rows": ("ids", "weights"),
    "mask": ("ids", "weights"),
    "row_factors": ("num_embeddings", "ranks", "col_factors"),
    "col_factors": ("features", "ranks", "row_factors"),
    "query": ("cores",),
    "lengths": ("offsets", "ids", "weights"),
    "offsets": ("ids",),
}


def one(rng: np.random.Generator) -> str:
    """One call with one to three malformed arguments; ``"raised"`` or ``"returned"``."""
    case = CASES[rng.integers(len(CASES))](rng)
    names = rng.permutation(list(case.kinds))[: rng.integers(1, 4)]
    hopeless = False
    for name in names:
        mutate = MUTATIONS[case.kinds[name]]
        case.arguments[name], certain = mutate(rng, case.arguments[name])
        hopeless |= certain
    what = f"{case.function.__qualname__}({', '.join(f'{k}={_brief(case.arguments[k])}' for k in names)})"
    try:
        jax.eval_shape(lambda: _arrays(case.function(**case.arguments)))
    except (ValueError, TypeError) as error:
        words = {word for name in names for word in (name, *ALIASES.get(str(name), ()))}
        named = any(word in str(error) for word in words)
        if not named and not any(_exotic(case.arguments[name]) for name in names):
            raise AssertionError(
                f"{what}: the message names no argument: {str(error)[:300]}"
            ) from error
        return "raised"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    assert not hopeless, f"{what}: accepted"
    return "returned"


def _exotic(value: Any) -> bool:
    def strange(part: Any) -> bool:
        return any(part is e for e in EXOTIC)

    return any(map(strange, jax.tree.leaves(value, is_leaf=strange)))


def _arrays(result: Any) -> Any:
    return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]


def _brief(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    text = repr(
        jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else x, value)
    )
    return text[:200]


# Valid calls.


def _cores() -> tuple[np.ndarray, ...]:
    return tuple(np.ones(shape, np.float32) for shape in SHAPE.core_shapes)


def _common(rng: np.random.Generator) -> dict[str, Any]:
    method = str(rng.choice(["auto", "native", "reference"]))
    bounds = str(rng.choice(["clip", "warn"]))
    return {"bounds": bounds, "method": method, "name": None, "dtype": None, "axis_name": None}


def _bags(rng: np.random.Generator) -> Any:
    if rng.integers(2):
        return jax_tt.Bags.from_ragged([[1, 2], [], [3]], [[1.0, 2.0], [], [0.5]])
    return jax_tt.Bags.from_padded(np.array([[1, -1], [2, 3]]))


def lookup(rng: np.random.Generator) -> Case:
    arguments = {"cores": _cores(), "ids": np.array([1, 2]), "num_embeddings": N} | _common(rng)
    return Case(jax_tt.tt.lookup, arguments | {"precision": None})


def bag(rng: np.random.Generator) -> Case:
    arguments = {"cores": _cores(), "bags": _bags(rng), "num_embeddings": N, "combiner": "sum"}
    return Case(jax_tt.tt.embed_bag, arguments | {"precision": "high"} | _common(rng))


def dense_bag(rng: np.random.Generator) -> Case:
    arguments = {"table": np.ones((9, 4), np.float32), "bags": _bags(rng), "combiner": "mean"}
    return Case(jax_tt.functional.embed_bag, arguments | _common(rng), table="dense")


def trained(rng: np.random.Generator) -> Case:
    which = rng.integers(3)
    rule = RULES[rng.integers(len(RULES))]
    start: Any = jnp.ones((9, 4)) if which == 0 else tuple(map(jnp.asarray, _cores()))
    options = {"grad_scale": None, "key": None, "precision": None} | _common(rng)
    del options["name"], options["axis_name"]
    table, state = fused(start, rule, N if which else None)
    arguments = {"table": table, "state": state} | options
    if which == 2:
        return Case(jax_tt.lookup, arguments | {"ids": np.array([[1, 2]])}, table="described")
    arguments |= {"bags": _bags(rng), "combiner": "sqrtn"}
    return Case(jax_tt.lookup_bags, arguments, table="described")


def to_dense(rng: np.random.Generator) -> Case:
    arguments = {"cores": _cores(), "num_embeddings": N, "dtype": None, "method": "auto"}
    return Case(jax_tt.tt.to_dense, arguments)


def attend(rng: np.random.Generator) -> Case:
    arguments = {"cores": _cores(), "query": np.ones((2, D), np.float32), "num_embeddings": N}
    return Case(jax_tt.tt.attend, arguments)


def initial(rng: np.random.Generator) -> Case:
    arguments = {"key": jax.random.key(0), "shape": SHAPE, "init": "normal", "dtype": jnp.float32}
    return Case(jax_tt.tt.init, arguments, key="needed_key", dtype="needed_dtype")


def count(rng: np.random.Generator) -> Case:
    arguments = {"ids_or_bags": _bags(rng), "num_embeddings": N}
    return Case(jax_tt.functional.count_out_of_range, arguments, num_embeddings="size")


def shape(rng: np.random.Generator) -> Case:
    sizes = {"num_embeddings": 120, "features": 8}
    if rng.integers(2):
        suggested = sizes | {"ranks": 4, "d": 3}
        return Case(jax_tt.TTShape.suggest, suggested, num_embeddings="size")
    given = sizes | {"ranks": (4, 4), "row_factors": (4, 5, 6), "col_factors": (2, 2, 2)}
    return Case(jax_tt.TTShape, given, num_embeddings="size")


def split(rng: np.random.Generator) -> Case:
    return Case(SHAPE.split_ids, {"ids": np.array([1, 2])})


def bags(rng: np.random.Generator) -> Case:
    which = rng.integers(4)
    if which == 0:
        rows = {"rows": [[1, 2], []], "weights": None, "capacity": None}
        return Case(jax_tt.Bags.from_ragged, rows)
    if which == 1:
        padded = {"ids": np.array([[1, -1]]), "pad_id": -1, "mask": None, "weights": None}
        return Case(jax_tt.Bags.from_padded, padded)
    flat = {"ids": np.array([1, 2, 3]), "weights": np.ones(3), "capacity": 5}
    if which == 2:
        return Case(jax_tt.Bags.from_offsets, flat | {"offsets": [0, 1, 3]})
    return Case(jax_tt.Bags.from_lengths, flat | {"lengths": [1, 2]})


def rule(rng: np.random.Generator) -> Case:
    return Case(optimizers.Adam, {"learning_rate": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8})


CASES = (
    lookup, lookup, bag, bag, bag, dense_bag, dense_bag, trained, trained, trained, to_dense, attend, initial, count,
    shape, split, bags, bags, rule
)  # fmt: skip


# Mutations: the new value, and whether it can only be wrong.


def _junk(
    rng: np.random.Generator, allowed: tuple[Any, ...] = (), may: tuple[type, ...] = ()
) -> tuple[Any, bool]:
    pool = SLIPS if rng.random() < 0.7 else EXOTIC
    value = pool[rng.integers(len(pool))]
    fine = any(value is a for a in allowed) or isinstance(value, may)
    return value, pool is SLIPS and not fine


def _array(rng: np.random.Generator) -> np.ndarray:
    dtype = rng.choice(
        ["float32", "float64", "int8", "int32", "int64", "uint64", "bool", "complex64", "object"]
    )
    return np.ones(tuple(rng.integers(0, 5, rng.integers(0, 6))), dtype)


def mutate_cores(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    kind = rng.integers(7)
    if kind == 0:
        return _junk(rng)
    cores = list(value)
    k = rng.integers(3)
    if kind == 1:
        cores[k], certain = _junk(rng)
        return tuple(cores), certain
    if kind == 2:
        cores[k] = _array(rng)
        return tuple(cores), cores[k].ndim != 4 or cores[k].dtype not in (np.float32,)
    if kind == 3:
        return tuple(cores[: rng.integers(0, 2)]), True
    if kind == 4:
        return tuple(cores * 2 + [cores[0]] * rng.integers(0, 3)), True
    if kind == 5:
        types = ("int32", "bool", "complex64", "float16", ml_dtypes.float8_e4m3fn)
        cores[k] = cores[k].astype(types[rng.integers(len(types))])
        return tuple(cores), True
    shape = list(cores[k].shape)
    axis = rng.choice([1, 3])
    shape[axis] += rng.integers(1, 3)
    cores[k] = np.ones(shape, np.float32)
    return tuple(cores), True


def mutate_ids(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    kind = rng.integers(5)
    if kind == 0:
        return _junk(rng, may=(int, np.integer, list, tuple, range))
    if kind == 1:
        array = _array(rng)
        return array, array.dtype.kind in "fcO" and array.size > 0
    if kind == 2:
        return jax_tt.SplitIds(_junk(rng)[0]), True
    if kind == 3:
        return jax_tt.SplitIds(np.zeros((2, rng.choice([1, 2, 4, 6])), np.int32)), True
    return np.array([2**40, -(2**50)]), False


def mutate_bags(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    kind = rng.integers(4)
    if kind == 0:
        return mutate_ids(rng, None)[0], False
    if kind == 1:
        return _junk(rng, may=(list,))
    field = str(rng.choice(["ids", "offsets", "weights"]))
    new = _junk(rng)[0] if rng.integers(2) else _array(rng)
    if field == "weights" and value.weights is None and new is None:
        return value, False
    changed = dataclasses.replace(value, **{field: new})
    return changed, field != "ids" and isinstance(new, str | bytes | dict | set | complex)


def mutate_ids_or_bags(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    changed, certain = mutate_bags(rng, value)
    # One id is no bag, but ids of any shape will do.
    return changed, certain and not isinstance(changed, int | np.integer | tuple | range)


def mutate_state(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    kind = rng.integers(3)
    if kind == 0:
        return _junk(rng)
    name = str(rng.choice(sorted(value)))
    if kind == 1:
        return {other: value[other] for other in value if other != name}, True
    new = _junk(rng)[0] if rng.integers(2) else _array(rng)
    return value | {name: new}, isinstance(new, str | bytes | dict | set | complex)


def mutate_dense(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    if rng.integers(2):
        return _junk(rng)
    array = _array(rng)
    return array, array.ndim != 2 or array.size == 0 or array.dtype.kind != "f"


def _of(
    *allowed: Any, may: tuple[type, ...] = ()
) -> Callable[[np.random.Generator, Any], tuple[Any, bool]]:
    def mutate(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
        return _junk(rng, allowed, may)

    return mutate


def mutate_weights(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    if rng.integers(2):
        return _junk(rng, may=(type(None), list, tuple, np.ndarray, jax.Array))
    return _array(rng), False


def mutate_sizes(rng: np.random.Generator, value: Any) -> tuple[Any, bool]:
    if rng.integers(2):
        return _junk(rng, may=(range, int, np.ndarray, jax.Array))
    changed = list(value) if isinstance(value, tuple) else [value] * 2
    changed[rng.integers(len(changed))], certain = _junk(rng, may=(int, np.floating))
    return tuple(changed), certain


MUTATIONS: dict[str, Callable[[np.random.Generator, Any], tuple[Any, bool]]] = {
    "cores": mutate_cores,
    "ids": mutate_ids,
    "bags": mutate_bags,
    "ids_or_bags": mutate_ids_or_bags,
    "described": _of(),
    "state": mutate_state,
    "dense": mutate_dense,
    "weights": mutate_weights,
    "offsets": mutate_weights,
    "nested": _of(may=(list, tuple, range)),
    "sizes": mutate_sizes,
    "ranks": mutate_sizes,
    "rows": _of(None, may=(int,)),
    "size": _of(may=(int,)),
    "capacity": _of(None, may=(int,)),
    "pad": _of(None, may=(int,)),
    "mask": _of(None, may=(list,)),
    "word": _of(),
    "bounds": _of(),
    "method": _of(),
    "name": _of(None, may=(str,)),
    # Whatever numpy takes for a type, and whatever counts as none given.
    "dtype": _of(None, may=(np.ndarray, np.generic, type, str, list, tuple, int)),
    "needed_dtype": _of(None, may=(np.ndarray, np.generic, type, str, list, tuple)),
    "axis_name": _of(None, may=(object,)),
    "precision": _of(None),
    "scale": _of(None, may=(int, float, np.number)),
    "key": _of(None),
    "needed_key": _of(may=(jax.Array,)),
    "shape": _of(),
    "number": _of(may=(int, float, np.number, type, jax.Array, np.ndarray)),
    "query": lambda rng, value: mutate_dense(rng, value) if rng.integers(2) else _junk(rng),
}

"""The FFI targets called behind the library's back: wrong sizes, counts, types, contents and attributes.

Whatever the mutation, the call may raise or return; it must not crash, and must not hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base import ffi
from tests.fuzz import calls, hash_calls, other_calls
from tests.fuzz.calls import DTYPES, Call, result_type

ERRORS = (jax.errors.JaxRuntimeError, ValueError, TypeError)
OTHER_DTYPES = (*DTYPES, "int8", "int32", "uint32", "int64", "bool", "complex64")
BUILDERS = (*calls.BUILDERS, *hash_calls.BUILDERS, *other_calls.BUILDERS)
HOSTILE = (0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))


def one(rng: np.random.Generator) -> str:
    """One call with up to three mutations; ``"raised"`` or ``"returned"``, ``"checked"`` where it was valid."""
    assert ffi.load("cpu") is not None, "no targets are registered"
    with jax.enable_x64(True):
        call = _valid(rng)
        mutations = rng.integers(0, 4)
        for _ in range(mutations):
            MUTATIONS[rng.integers(len(MUTATIONS))](rng, call)
        try:
            call.run()
        except ERRORS as error:
            assert mutations, f"a valid call was refused: {error}"
            return "raised"
        return "returned" if mutations else "checked"


def _valid(rng: np.random.Generator) -> Call:
    builder = BUILDERS[rng.integers(len(BUILDERS))]
    return builder(rng)


# Mutations. Aliased arguments and results change together, or XLA itself would refuse the program.


def _random_shape(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    if rng.random() < 0.6 and shape:
        changed = list(shape)
        k = rng.integers(len(changed))
        changed[k] = max(0, changed[k] + int(rng.integers(-2, 3)))
        return tuple(changed)
    return tuple(int(v) for v in rng.integers(0, 6, rng.integers(0, 4)))


def _set_arg(call: Call, k: int, value: np.ndarray) -> None:
    call.args[k] = value
    if k in call.aliases:
        call.results[call.aliases[k]] = result_type(value.shape, value.dtype)


def arg_shape(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.args)))
    shape = _random_shape(rng, np.shape(call.args[k]))
    _set_arg(call, k, np.resize(np.asarray(call.args[k]), shape))


def arg_dtype(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.args)))
    with np.errstate(all="ignore"):
        _set_arg(call, k, np.asarray(call.args[k]).astype(jnp.dtype(rng.choice(OTHER_DTYPES))))


def arg_contents(rng: np.random.Generator, call: Call) -> None:
    """Integers anywhere or nearly right, floats that are not finite."""
    k = int(rng.integers(len(call.args)))
    value = np.array(call.args[k])
    where = rng.random(value.shape) < rng.choice([0.05, 0.5, 1.0])
    if jnp.issubdtype(value.dtype, jnp.integer):
        info = np.iinfo(value.dtype)
        wild = rng.integers(info.min, info.max, value.shape, value.dtype, endpoint=True)
        if value.ndim and rng.integers(2):
            # A plan that is no longer this batch's is made anew; with its header it must be looked at.
            where[..., :8] = False
        with np.errstate(over="ignore"):
            near = value + rng.integers(0, 3, value.shape).astype(value.dtype)
        _set_arg(call, k, np.where(where, near if rng.integers(2) else wild, value))
    elif jnp.issubdtype(value.dtype, jnp.floating):
        _set_arg(
            call,
            k,
            np.where(where, np.asarray(rng.choice([np.nan, np.inf, 0]), value.dtype), value),
        )


def arg_count(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.args)))
    if rng.integers(2):
        call.args.append(call.args[k])
    elif not call.aliases:
        del call.args[k]
    elif len(call.args) - 1 in call.aliases:  # the last table, as argument and as result
        call.args.pop()
        call.results.pop(call.aliases.pop(len(call.args)))


def result_shape(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.results)))
    if k not in call.aliases.values():
        call.results[k] = result_type(
            _random_shape(rng, call.results[k].shape), call.results[k].dtype
        )


def result_dtype(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.results)))
    if k not in call.aliases.values():
        call.results[k] = result_type(call.results[k].shape, rng.choice(OTHER_DTYPES))


def result_count(rng: np.random.Generator, call: Call) -> None:
    k = int(rng.integers(len(call.results)))
    if rng.integers(2) or call.aliases or len(call.results) == 1:
        call.results.append(call.results[k])
    else:
        del call.results[k]


def _attributes(rng: np.random.Generator, call: Call) -> dict[str, Any]:
    """The attributes, or those of one of several tables."""
    of_tables = [value for value in call.attributes.values() if isinstance(value, dict)]
    return of_tables[rng.integers(len(of_tables))] if of_tables else call.attributes


def attribute_value(rng: np.random.Generator, call: Call) -> None:
    attributes = _attributes(rng, call)
    if not attributes:  # all of them were left out before
        return
    name = str(rng.choice(list(attributes)))
    value = attributes[name]
    if isinstance(value, bool):
        attributes[name] = not value
    elif isinstance(value, str):
        attributes[name] = str(rng.choice(["", "x" * 5000, "\0", "ü%s%n"]))
    elif np.ndim(value) == 0:
        attributes[name] = np.int64(
            rng.choice(HOSTILE) if rng.random() < 0.7 else value + rng.integers(-3, 4)
        )
    elif rng.random() < 0.3 or np.size(value) == 0:
        attributes[name] = np.resize(value, int(rng.integers(0, 8)))
    else:
        changed = np.array(value, np.int64)
        k = rng.integers(len(changed))
        changed[k] = rng.choice(HOSTILE) if rng.random() < 0.7 else changed[k] + rng.integers(-2, 3)
        attributes[name] = changed


def attribute_type(rng: np.random.Generator, call: Call) -> None:
    attributes = call.attributes if rng.integers(4) == 0 else _attributes(rng, call)
    if not attributes:  # all of them were left out before
        return
    name = str(rng.choice(list(attributes)))
    value = attributes[name]
    others = [
        np.int32(3),
        np.float32(1),
        "text",
        True,
        np.int64(1),
        np.arange(3),
        np.ones(3, np.float32),
    ]
    attributes[name] = (
        np.asarray(value, np.int32) if np.ndim(value) else others[rng.integers(len(others))]
    )


def attribute_count(rng: np.random.Generator, call: Call) -> None:
    attributes = call.attributes if rng.integers(4) == 0 else _attributes(rng, call)
    if not attributes or rng.integers(2):
        attributes["another"] = np.int64(1)
    else:
        del attributes[str(rng.choice(list(attributes)))]


def not_in_place(rng: np.random.Generator, call: Call) -> None:
    if call.aliases:
        del call.aliases[int(rng.choice(list(call.aliases)))]


MUTATIONS: tuple[Callable[[np.random.Generator, Call], None], ...] = (
    arg_shape, arg_dtype, arg_contents, arg_contents, arg_count, result_shape, result_dtype, result_count,
    attribute_value, attribute_value, attribute_type, attribute_count, not_in_place
)  # fmt: skip

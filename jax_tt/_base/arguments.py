"""Checks of single arguments: every error names the argument, its value and what is accepted."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.host_table import from_tensor, is_tensor, native_type

T = TypeVar("T")


def mismatch(
    name: Any, got: Any, expected: Any, fix: str = "", error: type[Exception] = ValueError
) -> Exception:
    """The error about an argument that is not what it has to be; ``got`` is the argument, or says what it is."""
    if isinstance(got, np.generic):
        got = f"{got} of {got.dtype}"
    elif isinstance(getattr(got, "dtype", None), np.dtype):
        got = f"{got.dtype} of shape {tuple(got.shape)}"
    elif not isinstance(got, str | int | float | tuple):
        got = type_of(got)
    return error(f"{name}: got {got}; expected {expected}.{' ' if fix else ''}{fix}")


def expect(
    holds: Any,
    name: str,
    got: Any,
    expected: Any,
    fix: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raises the error of `mismatch` unless ``holds``."""
    if not holds:
        raise mismatch(name, got, expected, fix, error)


def shown(value: Any) -> str:
    """A value as Python writes it if that is short and says something, else its type."""
    text = repr(value)
    told = len(text) < 80 and "\n" not in text and not text.startswith("<")
    return text if told else type_of(value)


def instance_of(name: str, value: Any, kind: type[T] | Any, expected: str, fix: str = "") -> T:
    """The value, which has to be of this type, or of one of them."""
    if not isinstance(value, kind):
        short = isinstance(value, str | int | float | tuple | type) and len(repr(value)) < 80
        raise mismatch(name, repr(value) if short else type_of(value), expected, fix, TypeError)
    return value


def concrete(name: str, value: Any, why: str) -> None:
    """Refuses traced arrays, also inside of a pytree; ``why`` is a sentence."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise mismatch(name, "a traced array", "a concrete one", why, TypeError)


def expect_ids(
    name: str, ids: np.ndarray, count: int, of: str = "the rows of the table", what: str = "id"
) -> None:
    """Refuses integers that are not from 0 to ``count - 1``."""
    outside = ids[(ids < 0) | (ids >= count)]
    if outside.size:
        raise mismatch(name, f"the {what} {outside[0]}", f"0 to {count - 1}, {of}")


def type_of(value: Any) -> str:
    """The type of a value with its article, such as "an int" and "a str"; "None" for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if re.match('[aeio]|ndarray|update', name, re.I) else 'a'} {name}"


def as_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An exact integer: floats are not truncated, and bools are not integers; of at least and at most these."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        known = " known when the call is traced" if isinstance(value, Tracer) else ""
        raise TypeError(f"{name}: got {_with_type(value)}; expected an integer{known}.") from error
    if least is not None and most is not None and most <= 2**30:
        if not least <= number <= most:
            raise mismatch(name, number, f"an integer from {least} to {most}")
    elif least is not None and number < least:
        raise mismatch(name, number, f"an integer >= {least}")
    elif most is not None and number > most:  # the largest of a type
        raise mismatch(name, number, f"an integer below 2**{most.bit_length()}")
    return number


def _with_type(value: Any) -> str:
    text = shown(value)
    return text if text == type_of(value) else f"{text} of type {type(value).__name__}"


def as_positive(name: str, value: Any) -> int:
    """An integer of at least 1."""
    return as_int(name, value, 1)


def as_number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> float:
    """A number, not a bool, for which ``holds``; ``expected`` is that in words."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise mismatch(name, shown(value), expected)
    return float(value)


def as_array(name: str, value: Any) -> Any:
    """Arrays unchanged, anything else that holds numbers as a numpy array, in the byte order of this machine.

    Integers in lists or in arrays of objects have the first type of int64 and uint64 that holds all of them.
    """
    if isinstance(value, jax.Array):
        return value
    if is_tensor(value):
        value = from_tensor(name, value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(
            f"{name}: got a masked array, whose mask would be lost; pass array.filled(value), or array.compressed() "
            "without what is masked."
        )
    try:
        if hasattr(value, "__jax_array__"):
            return jnp.asarray(value)
        array = np.asarray(value)
        # numpy has no integer type for int64 and uint64 together.
        if array.dtype == np.float64 and _begins_with_an_integer(value):
            exact = np.array(value, object)
            array = exact if _are_integers(exact) else array
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(
            f"{name}: got {type_of(value)} that is no array ({error}); expected an array of numbers."
        ) from error
    if array.dtype.kind == "O" and array.size and _are_integers(array):
        return _of_64_bits(name, array)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"{name}: got {type_of(value)} (dtype {array.dtype}); expected an array of numbers."
        )
    return array.astype(native_type(array.dtype), copy=False)


def joined_integers(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of integers ``[n]``, one after another, in a type that holds them all; of floats, as numpy joins them."""
    if not parts:
        return np.zeros(0, np.int64)
    # numpy makes floats of these together.
    types = {part.dtype for part in parts}
    if np.dtype(np.uint64) not in types or {dtype.kind for dtype in types} != {"i", "u"}:
        return np.concatenate(parts)
    return as_array(name, np.concatenate([part.astype(object) for part in parts]))


def _begins_with_an_integer(value: Any) -> bool:
    """Whether the first number in nested lists is an integer: of lists of floats no other one is looked at."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, int) or getattr(getattr(value, "dtype", None), "kind", "f") in "iu"


def _are_integers(objects: np.ndarray) -> bool:
    kinds = set(map(type, objects.reshape(-1).tolist()))
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)


def _of_64_bits(name: str, objects: np.ndarray) -> np.ndarray:
    """Python's integers in an array, in int64 or uint64."""
    flat = list(map(int, objects.reshape(-1).tolist()))
    low, high = min(flat), max(flat)
    if low < -(2**63) or high >= 2**64:
        raise ValueError(
            f"{name}: got {low if low < -(2**63) else high}; expected integers from -2**63 to 2**64 - 1."
        )
    if low < 0 and high >= 2**63:
        raise ValueError(
            f"{name}: got {low} and {high}, which no type of 64 bits holds together; expected integers from -2**63 to "
            "2**63 - 1, or from 0 to 2**64 - 1. Of keys, pass key % 2**64 for each."
        )
    return objects.astype(np.int64 if high < 2**63 else np.uint64)


def integers(name: str, array: Any, given: Any, empty: Any = np.int64) -> Any:
    """The array of what was given, which has to be integers; an empty list, without a type of its own, is ``empty``."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array
    if array.size or isinstance(given, jax.Array | np.ndarray):
        raise mismatch(name, f"dtype {array.dtype}", "integers, e.g. ids.astype(np.int64)")
    return array.astype(empty)


def as_condition(
    name: str, condition: Any, view: Any, shape: tuple[int, ...], each: str
) -> jax.Array | np.ndarray:
    """What a condition, a function of ``view``, returns: bool of this shape, one for ``each``."""
    if not callable(condition):
        raise TypeError(
            f"{name}: got {type_of(condition)}; expected a function of {type_of(view)} that returns bool of shape "
            f"{shape}, one {each}, e.g. lambda view: view.age > 1000."
        )
    chosen = condition(view)
    chosen = np.asarray(chosen) if isinstance(chosen, list) else chosen
    of_arrays = isinstance(chosen, jax.Array | np.ndarray)
    if not of_arrays or chosen.shape != shape or chosen.dtype != bool:
        got = f"{chosen.dtype} of shape {chosen.shape}" if of_arrays else type_of(chosen)
        raise (ValueError if of_arrays else TypeError)(
            f"{name}: returned {got}; expected an array, bool of shape {shape}, one {each}."
        )
    return chosen


def as_scalar(name: str, value: Any) -> Any:
    """A zero-dimensional array that holds a real number."""
    array = as_array(name, value)
    real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if array.shape != () or not real:
        raise mismatch(name, array, "one real number")
    return array


def as_dtype(name: str, value: Any, default: Any) -> Any:
    """A floating type; ``default`` for None."""
    if value is None:
        return default
    try:
        if isinstance(value, jax.Array | np.ndarray):  # which have a type
            raise TypeError(f"an array of {value.dtype}")
        dtype = jnp.dtype(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: got {shown(value)}; expected a type such as jnp.float32, or None."
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise mismatch(name, str(dtype), "a floating type")
    return dtype


def one_of(name: str, value: Any, choices: Sequence[str], hint: str = "") -> str:
    """A string that is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise mismatch(name, shown(value), f"one of {', '.join(map(repr, choices))}{hint}")
    return value


def narrow(values: Any) -> Any:
    """The same values in int32; values outside its range become its limits, and stay out of range."""
    info, limits = jnp.iinfo(values.dtype), jnp.iinfo(jnp.int32)
    if info.min < limits.min or info.max > limits.max:
        xp = np if isinstance(values, np.ndarray) else jnp
        low, high = (np.asarray(x, values.dtype) for x in (max(info.min, limits.min), limits.max))
        values = xp.clip(values, low, high)
    return values.astype(np.int32)

"""Checks of arrays by table and name, as `Collection.init` returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._collection.statistics import STATISTICS, TOTALS, init_totals
from jax_tt._lookup._shared import Shared

# In the state of a collection, the scalars that its fused tables share.
UPDATES = "updates"

_BY_TABLE = "a mapping from tables to arrays by name, as Collection.init returns it"
_BY_NAME = "the arrays of the table by name, as Collection.init returns them"


def check_states(argument: str, given: Any, tables: Iterable[str]) -> None:
    """Raises unless ``given`` has arrays by name of all these tables; others are not looked at."""
    _check_mapping(argument, given, _BY_TABLE)
    for name in tables:
        if name not in given:
            raise ValueError(
                f"{argument}: has no table {name!r}; expected what Collection.init returns, with the tables "
                f"{listed(tables)}."
            )
        _check_mapping(f"{argument}[{name!r}]", given[name], _BY_NAME)


def check_shared(argument: str, state: Mapping[str, Any], tables: int) -> None:
    """Raises unless a state has the scalars that so many tables share."""
    if not isinstance(state.get(UPDATES), Mapping):
        raise ValueError(
            f"{argument}: has no {UPDATES!r}, the step counts of tables with an optimizer; expected what "
            "Collection.init returns. Collection.joined makes it from the states of single tables."
        )
    name = f"{argument}[{UPDATES!r}]"
    check_arrays(name, state[UPDATES], Shared._fields)
    for scalar in Shared._fields:
        value = state[UPDATES].get(scalar)
        # States of several models may be stacked along further axes.
        shape = (tables,) if scalar == "step" else ()
        got = getattr(value, "shape", None)
        fits = got is not None and got[len(got) - len(shape) :] == shape
        if not fits or value.dtype != jnp.float32:
            what = type(value).__name__ if got is None else f"{value.dtype} of shape {got}"
            raise ValueError(
                f"{name}[{scalar!r}]: got {what}; expected a float32 array of shape {shape}, as Collection.init "
                "returns it."
            )


def check_statistics(argument: str, state: Mapping[str, Any], tables: int) -> None:
    """Raises unless the totals of a state, if it has any, are those of so many tables."""
    _check_mapping(argument, state, _BY_TABLE)
    if STATISTICS not in state:
        return
    name = f"{argument}[{STATISTICS!r}]"
    _check_mapping(name, state[STATISTICS], "a mapping, as Collection.with_statistics returns it")
    expected = jax.eval_shape(lambda: init_totals(tables))
    got = state[STATISTICS].get(TOTALS)
    # States of several models may be stacked along further axes.
    shape = getattr(got, "shape", None)
    if shape is None or shape[-3:] != expected.shape or got.dtype != expected.dtype:
        what = f"a {type(got).__name__}" if shape is None else f"{got.dtype} of shape {shape}"
        raise ValueError(
            f"{name}[{TOTALS!r}]: got {what}; expected {expected.dtype} of shape {expected.shape}. "
            "Collection.with_statistics(state) begins to count."
        )


def check_tables(argument: str, given: Any, known: Iterable[str]) -> None:
    """Raises for a table that does not exist, and for arrays that are not by name."""
    _check_mapping(argument, given, _BY_TABLE)
    for name, own in given.items():
        if name not in known:
            raise ValueError(f"{argument}: got the table {name!r}; expected {listed(known)}.")
        _check_mapping(f"{argument}[{name!r}]", own, _BY_NAME)


def check_arrays(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises for names of arrays that a table does not have."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"{argument}: got the array {name!r}, which the table does not have; expected {listed(known)}."
            )


def check_like(argument: str, given: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raises unless ``given`` has the arrays of ``like`` by name, with their shapes."""
    for name, array in like.items():
        shape = getattr(given.get(name), "shape", None)
        if shape != array.shape:
            got = f"has no array {name!r}" if shape is None else f"{name!r} has shape {shape}"
            raise ValueError(f"{argument}: {got}; expected shape {array.shape}.")


def listed(names: Iterable[str]) -> str:
    """Names in an error message."""
    return ", ".join(map(repr, names))


def _check_mapping(argument: str, given: Any, expected: str) -> None:
    if not isinstance(given, Mapping):
        got = "None" if given is None else f"a {type(given).__name__}"
        raise TypeError(f"{argument}: got {got}; expected {expected}.")

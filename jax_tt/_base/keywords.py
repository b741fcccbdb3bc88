"""Errors about keywords and other names: they say what the user called, and the nearest name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from jax_tt._base.arguments import mismatch

Function = TypeVar("Function", bound=Callable[..., Any])

# What arguments are called in other libraries.
_ELSEWHERE = {
    "mode": "combiner",
    "pooling": "combiner",
    "vocab_size": "num_embeddings",
    "input_dim": "num_embeddings",
    "embedding_dim": "features",
    "output_dim": "features",
    "dim": "features",
}
_CACHE = "a row cache is for tensor-train tables: TTEmbed, TTEmbedBag or tt_table"


def no_such(kind: str, name: Any, known: Collection[str]) -> str:
    """The message about a name that is not among those that are known."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{kind}: got {name!r}; expected one of {', '.join(known)}.{hint}"


def expect_names(argument: str, kind: str, given: Iterable[Any], known: Collection[str]) -> None:
    """Raises for the first of the names that is not among those that are known."""
    for name in given:
        if name not in known:
            expected = f"some of {', '.join(map(repr, known))}"
            raise mismatch(argument, f"the {kind} {name!r}", expected)


class UnknownName(KeyError):
    """The `KeyError` with the message of `no_such`, whose arguments it has; it is written when it is shown."""

    def __init__(self, kind: str, name: Any, known: Collection[str]) -> None:
        super().__init__(kind, name, tuple(known))  # an error keeps no tables

    def __str__(self) -> str:
        return no_such(*self.args)


def check_keywords(caller: str, given: Collection[str], accepted: Collection[str]) -> None:
    """Raises a `TypeError` for the first keyword that ``caller`` does not accept."""
    unknown = next((name for name in given if name not in accepted), None)
    if unknown is None:
        return
    near = difflib.get_close_matches(unknown, accepted, 1)
    if _ELSEWHERE.get(unknown) in accepted:
        near = [_ELSEWHERE[unknown]]
    if unknown == "cache":
        advice = _CACHE
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"expected some of {', '.join(accepted)}."
    raise TypeError(f"{caller}: got an unexpected argument {unknown!r}; {advice}")


def checks_keywords(function: Function) -> Function:
    """Decorates a function whose keywords are checked by `check_keywords`."""
    accepted = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        check_keywords(function.__name__, keywords, accepted)
        return function(*args, **keywords)

    return checked  # pyright: ignore[reportReturnType]


class ChecksKeywords:
    """Base of classes whose constructors' keywords are checked by `check_keywords`, with the name of the subclass."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        del args
        check_keywords(cls.__name__, keywords, _accepted(cls))
        return super().__new__(cls)


@functools.cache
def _accepted(cls: type) -> tuple[str, ...]:
    """The keywords of a constructor, and of those that it passes its other keywords to."""
    found: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        found += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return tuple(dict.fromkeys(found))

"""Checks of the constructor arguments that NNX and linen layers share."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from jax_tt._base.arguments import one_of
from jax_tt._table.options import COMBINERS


def check_rngs(rngs: Any) -> None:
    """Raises unless a layer can draw its parameters from ``rngs``."""
    if not callable(getattr(rngs, "params", None)):
        raise TypeError(
            f"rngs: got a {type(rngs).__name__}; expected flax.nnx.Rngs, e.g. rngs=nnx.Rngs(0), or nnx.Rngs(key) for a "
            "key of jax.random."
        )


def bags_of(rows: Any) -> Any:
    """Decorates a constructor of bags that passes ``options`` to a constructor of rows.

    Callers see one list of arguments, ``combiner`` among them, and ``combiner`` is checked before a table is made.
    """
    signature = inspect.signature(rows)
    kept = [p for name, p in signature.parameters.items() if name != "promote_dtype"]
    combiner = inspect.Parameter(
        "combiner", inspect.Parameter.KEYWORD_ONLY, default="sum", annotation=str
    )
    sizes = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in kept)
    signature = signature.replace(parameters=[*kept[:sizes], combiner, *kept[sizes:]])

    def decorate(bags: Any) -> Any:
        @functools.wraps(bags)
        def constructor(self: Any, *args: Any, **options: Any) -> None:
            signature.bind(self, *args, **options)
            one_of("combiner", options.get("combiner", "sum"), COMBINERS)
            bags(self, *args, **options)

        constructor.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return constructor

    return decorate

"""Checks of the constructor arguments that NNX and linen layers share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tt._arguments import one_of
from jax_tt._shape import TTShape
from jax_tt._tables.options import COMBINERS, Update
from jax_tt.optimizers import Optimizer

_DEFAULT_CORES = 3


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


def table_shape(
    num_embeddings: int,
    features: int,
    tt_ranks: int | Sequence[int],
    row_factors: Sequence[int] | None,
    col_factors: Sequence[int] | None,
) -> TTShape:
    """The `TTShape` of a layer, with suggestions for missing factors.

    The number of cores is that of the given factors or ranks, or 3.
    """
    ranks = _ranks(tt_ranks)
    d = _num_cores(ranks, row_factors, col_factors)
    if isinstance(ranks, tuple) and len(ranks) != d - 1:
        raise ValueError(
            f"tt_ranks: got {len(ranks)} ranks {ranks} for {d} factors; expected one integer or the "
            f"{d - 1} inner ranks, e.g. tt_ranks={(32,) * (d - 1)}."
        )
    if row_factors is None or col_factors is None:
        suggested = TTShape.suggest(num_embeddings, features, ranks, d=d)
        row_factors = suggested.row_factors if row_factors is None else row_factors
        col_factors = suggested.col_factors if col_factors is None else col_factors
    return TTShape(num_embeddings, features, ranks, row_factors, col_factors)


def _ranks(tt_ranks: Any) -> int | tuple[int, ...]:
    def rank(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"tt_ranks: got {tt_ranks!r}; expected an integer >= 1 or a tuple of them, one per "
                f"pair of neighbouring cores, e.g. tt_ranks=32 or tt_ranks=(32, 32)."
            )
        if value < 1:
            raise ValueError(f"tt_ranks: got {tt_ranks!r}; expected ranks >= 1, e.g. tt_ranks=32.")
        return operator.index(value)

    if isinstance(tt_ranks, Sequence | np.ndarray) and not isinstance(tt_ranks, str):
        if not 1 <= len(tt_ranks) <= 4:
            raise ValueError(
                f"tt_ranks: got {len(tt_ranks)} ranks {tuple(tt_ranks)}; expected one integer, or 1 to 4 "
                f"ranks for 2 to 5 cores, e.g. tt_ranks=(32, 32)."
            )
        return tuple(rank(value) for value in tt_ranks)
    return rank(tt_ranks)


def _num_cores(ranks: int | tuple[int, ...], *factors: Sequence[int] | None) -> int:
    for name, values in zip(("row_factors", "col_factors"), factors, strict=True):
        if values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            raise TypeError(
                f"{name}: got {values!r}; expected a tuple of 2 to 5 integers, e.g. (4, 4, 4), or None."
            )
        if not 2 <= len(values) <= 5:
            raise ValueError(
                f"{name}: got {len(values)} factors {tuple(values)}; expected 2 to 5, one per core, "
                f"or None to have them suggested."
            )
        return len(values)
    return _DEFAULT_CORES if isinstance(ranks, int) else len(ranks) + 1


def described_update(
    optimizer: Optimizer | None, skip_nonfinite: bool, stochastic_rounding: bool
) -> Update | None:
    """The update of a layer, whose optimizer is static."""
    if optimizer is None:
        return None
    update = Update(optimizer, skip_nonfinite, stochastic_rounding)
    _check_static(optimizer)
    return update


def _check_static(optimizer: Optimizer) -> None:
    """Raises unless the hyper-parameters are hashable, since the optimizer of a layer is static."""
    try:
        hash(optimizer)
    except TypeError:
        held = [k for k, v in vars(optimizer).items() if hasattr(v, "shape")]
        name = held[0] if held else "learning_rate"
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} holds an array in {', '.join(held) or 'a field'}; the rule of a "
            "layer is part of the program and holds floats or schedules of the step. A value that changes between "
            f"steps goes to the call, hyperparameters={{{name!r}: value}}, or, in NNX only, into a variable, "
            f"{name}=nnx.Variable(jnp.float32(0.05))."
        ) from None

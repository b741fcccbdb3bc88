"""Constructor arguments of the layers, checked once for NNX and linen."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._method import resolve_method
from jax_tt._ops._canonical import STORAGE
from jax_tt._ops._spec import BOUNDS
from jax_tt._precision import resolve_precision
from jax_tt._shape import TTShape
from jax_tt.optimizers import Optimizer
from jax_tt.order import IdOrder

_DEFAULT_CORES = 3


def table_shape(
    num_embeddings: int,
    features: int,
    tt_ranks: int | Sequence[int],
    row_factors: Sequence[int] | None,
    col_factors: Sequence[int] | None,
) -> TTShape:
    """The `TTShape` of a layer; factors that are left out are suggested.

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


def check_sizes(num_embeddings: Any, features: Any) -> None:
    """Refuses sizes of a dense table that are no positive integers (`TTShape` checks its own)."""
    for name, value in (("num_embeddings", num_embeddings), ("features", features)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name}: got {value!r}; expected an integer >= 1.")
        if value < 1:
            raise ValueError(f"{name}: got {value}; expected an integer >= 1.")


def check_options(
    *, bounds: Any, method: Any, optimizer: Any, param_dtype: Any, precision: Any = None
) -> None:
    """Refuses option values that no op understands, with the choices in the message."""
    if bounds not in BOUNDS:
        raise ValueError(
            f"bounds: got {bounds!r}; expected one of {_choices(BOUNDS)}. 'error' stops at ids out of range, 'warn' "
            "and 'zero' read zeros for them, with a warning and without, 'clip' moves them to the nearest row."
        )
    resolve_method(method)
    resolve_precision(precision)
    if jnp.dtype(param_dtype).name not in STORAGE:
        raise ValueError(
            f"param_dtype: got {jnp.dtype(param_dtype).name}; expected one of {_choices(STORAGE)}."
        )
    check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Refuses what is not a rule of ``jax_tt.optimizers``, optax transformations above all."""
    if optimizer is None:
        return
    if isinstance(optimizer, Optimizer):
        _check_static(optimizer)
        return
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: got the class {optimizer.__name__}; expected an instance of it, e.g. "
            f"optimizer=jax_tt.optimizers.{optimizer.__name__}(learning_rate=0.05)."
        )
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer: got an optax transformation ({type(optimizer).__name__}); a fused table is "
            "updated inside the backward pass, by a rule of jax_tt.optimizers, e.g. optimizer="
            "jax_tt.optimizers.Adagrad(learning_rate=0.05). To use optax for the table, leave "
            "optimizer=None and give the transformation to nnx.Optimizer or TrainState."
        )
    raise TypeError(
        f"optimizer: got {optimizer!r}; expected None or a rule of jax_tt.optimizers, e.g. "
        "jax_tt.optimizers.Adagrad(learning_rate=0.05)."
    )


def check_id_order(id_order: Any, num_embeddings: int) -> None:
    """Refuses what is no `IdOrder`, or one of another number of ids."""
    if id_order is None:
        return
    if not isinstance(id_order, IdOrder):
        raise TypeError(
            f"id_order: got a {type(id_order).__name__}; expected None or a jax_tt.order.IdOrder, e.g. "
            "jax_tt.order.from_counts(counts)."
        )
    if id_order.num_embeddings != num_embeddings:
        raise ValueError(
            f"id_order: got an order of {id_order.num_embeddings} ids for a table of {num_embeddings} rows; make it "
            "with the layer's tt_shape."
        )


def _check_static(optimizer: Optimizer) -> None:
    """A layer's rule is part of the program, so its hyper-parameters must be hashable."""
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


def _choices(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))

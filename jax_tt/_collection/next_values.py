"""The next values that overwrite fused tables; tables that the loss did not use keep theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any
from weakref import WeakValueDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jax_tt._base import reports
from jax_tt._kinds.cached.table import outer_name
from jax_tt._lookup.one_loss import Loss
from jax_tt._table.state import sentinel_untouched, spoilt_sentinel

Path = tuple[Any, ...]
_USED, _SENTINEL, _STEP = ((name, outer_name(name)) for name in ("used", "sentinel", "step"))
# What the names of the cached rows of a table begin with.
_OF_ROWS = outer_name("")
# Traced step counts that an update has replaced, and those that it has written, by id.
_replaced: WeakValueDictionary[int, Any] = WeakValueDictionary()
_written: WeakValueDictionary[int, Any] = WeakValueDictionary()


def next_values(
    caller: str,
    old: Mapping[Path, Any],
    new: Mapping[Path, Any],
    start: Start | None = None,
) -> dict[Path, Any]:
    """The variables to write, by path: the variables in ``new`` of all tables that the loss used.

    A traced program selects between old and new. The compiler removes the selection if ``used`` is a constant, that is,
    except behind a ``cond``. This matters because reading the old table would force a copy of it before the in-place
    update.

    Args:
        caller: for error messages.
        old: variables of the model, including those of fused tables.
        new: their next values, as the backward pass returned them; variables of no fused table are returned unchanged.
        start: the tables that ``new`` were computed from; None if unknown.

    Raises:
        ValueError: ``new`` left the compiled function that computed them; tables were changed after ``start``; or,
            outside ``jit``, they are not what the steps of the tables returned, or ``start`` are the arrays of another
            model. Inside ``jit``, sentinels are written that the next forward pass refuses, if the numbers of steps
            differ: equal ones do not tell another model from a copy.
    """
    _check_alive(caller, new)
    outdated = _is_outdated(caller, old, start) if start else False
    tables = {_table_of(path): path for path in used_flags(new)}
    known = _known({path: new[path] for path in new if path[-1] in (*_USED, *_SENTINEL)})
    unused = {table: _is_unused(known.get(path, new[path])) for table, path in tables.items()}
    result = {}
    for path, value in new.items():
        skip = _nearest(path, unused)
        if path[-1] in _SENTINEL:
            if path in known and not isinstance(skip, jax.Array):
                _check_sentinel(caller, path, known[path], skip)
            else:
                value = spoilt_sentinel(value)
            if outdated is not False:
                value = jnp.where(outdated, jnp.nan, value)
        if skip is True:
            continue
        result[path] = value if skip is False else _either(skip, old[path], value)
    return result


class Start:
    """The arrays of fused tables that next values were computed from.

    It keeps the step counts alive, and no table.
    """

    def __init__(self, arrays: Mapping[Path, Any]) -> None:
        self.counts = _step_counts(arrays)
        self._arrays = {path: [*map(_reference, jax.tree.leaves(x))] for path, x in arrays.items()}

    def changed(self, now: Mapping[Path, Any]) -> list[Path]:
        """The arrays that were written since in tables that are not others or copies."""
        same = {_table_of(path) for path, count in self.counts.items() if now[path] is count}
        return [
            path
            for path, refs in self._arrays.items()
            if _table_of(path) in same
            and any(
                there() is not x for there, x in zip(refs, jax.tree.leaves(now[path]), strict=True)
            )
        ]

    def differing(self, now: Mapping[Path, Any]) -> list[Path]:
        """The arrays of other tables, as far as both can be read on the host, that are no copies."""
        pairs = {
            (path, k): (there(), x)
            for path, refs in self._arrays.items()
            for k, (there, x) in enumerate(zip(refs, jax.tree.leaves(now[path]), strict=True))
        }
        others = {where: (a, b) for where, (a, b) in pairs.items() if a is not b and _is_there(a)}
        before, after = (_known({w: pair[k] for w, pair in others.items()}) for k in (0, 1))
        return [
            where[0]
            for where in before.keys() & after.keys()
            if not _same_bits(before[where], after[where])
        ]


def _is_there(array: Any) -> bool:
    """Whether an array holds values: it is not traced, and was neither collected nor donated."""
    if array is None or isinstance(array, Tracer):
        return False
    return not (isinstance(array, jax.Array) and array.is_deleted())


def _same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def _reference(array: Any) -> Callable[[], Any]:
    try:
        return ref(array)
    except TypeError:  # a scalar of numpy or Python
        return lambda: array


def _step_counts(arrays: Mapping[Path, Any]) -> dict[Path, Any]:
    return {path: value for path, value in arrays.items() if path[-1] in _STEP}


def note_update(old: Mapping[Path, Any], written: Mapping[Path, Any]) -> None:
    """Notes that an update has overwritten variables; next values that were computed before it are then outdated."""
    for path, after in _step_counts(written).items():
        before = old[path]
        if isinstance(before, Tracer) and isinstance(after, Tracer):
            _replaced[id(before)], _written[id(after)] = before, after


def _is_outdated(caller: str, now: Mapping[Path, Any], start: Start) -> Any:
    """Whether tables were stepped since their next values were computed: False, or an array if it is not known yet.

    The same arrays are the same tables. Others may be copies, such as the operands of a ``cond``; the numbers of their
    steps decide.
    """
    if changed := start.changed(now):
        raise ValueError(
            f"{caller}: {names_of(changed)} of fused tables were changed after grads were computed, as by an insertion "
            "or a refresh of a cache, which next values would undo. Change tables before gradients are computed, or "
            "after the update."
        )
    others = [path for path, count in start.counts.items() if now[path] is not count]
    known = _known(
        {(k, path): own[path] for k, own in enumerate((start.counts, now)) for path in others}
    )
    late, unknown = [], []
    for path in others:
        before, after = start.counts[path], now[path]
        if {(0, path), (1, path)} <= known.keys():
            if np.any(known[0, path] != known[1, path]):
                late.append(path)
        elif id(before) in _replaced and id(after) in _written:
            late.append(path)
        else:
            unknown.append(jnp.any(jnp.asarray(before) != after))
    if late:
        tables = {".".join(map(str, path[:-1])) or "the model itself" for path in late}
        raise ValueError(
            f"{caller}: grads were computed before another update of the fused tables {', '.join(sorted(tables))}. "
            "Their next values start from the tables before that update and would undo it. Compute gradients after "
            "the previous update; for two losses of a model, those of their sum, or the second ones after the first "
            "update."
        )
    if others and (foreign := start.differing(now)):
        raise ValueError(
            f"{caller}: grads were computed from other arrays than {names_of(foreign)} of this model, as those of "
            "another model with the same structure, and their next values would overwrite this one with the other. "
            "Compute the gradients of the model that is updated."
        )
    return jnp.any(jnp.stack(unknown)) if unknown else False


def check_paths(caller: str, old: Mapping[Path, Any], new: Mapping[Path, Any]) -> None:
    """Raises if next values lack a fused variable of a model, or hold another."""
    expected = "expected what value_and_grad returned for this model."
    if foreign := new.keys() - old.keys():
        raise ValueError(f"{caller}: grads hold {names_of(foreign)}, which model lacks; {expected}")
    if missing := old.keys() - new.keys():
        raise ValueError(f"{caller}: grads lack {names_of(missing)} of the model; {expected}")


def without_lookup(paths: Iterable[Path], reached: Set[Path]) -> list[Path]:
    """The arrays that a backward pass has reached in tables that none of its lookups has stepped."""
    unused = {_table_of(path): path not in reached for path in used_flags(paths)}
    return [path for path in paths if path in reached and _nearest(path, unused)]


def names_of(paths: Iterable[Path]) -> str:
    """The variables in words."""
    return ", ".join(sorted(".".join(map(str, path)) for path in paths))


def _check_alive(caller: str, new: Mapping[Path, Any]) -> None:
    traced = next(
        (new[path] for path in new if path[-1] in _SENTINEL and isinstance(new[path], Tracer)), None
    )
    if traced is None:
        return
    try:
        sentinel_untouched(traced)
    except jax.errors.UnexpectedTracerError:
        raise ValueError(
            f"{caller}: grads left the compiled function that computed them, and the next values of fused tables do "
            "not leave it with them. Compute the gradients and update in the same jitted function."
        ) from None


def _nearest(path: Path, unused: Mapping[tuple[Path, bool], Any]) -> Any:
    """The flag of the table of a variable, or that of the collection around it; False without one."""
    outer, of_rows = _table_of(path)
    return next(
        (
            unused[outer[:depth], of_rows]
            for depth in range(len(outer), -1, -1)
            if (outer[:depth], of_rows) in unused
        ),
        False,
    )


def _table_of(path: Path) -> tuple[Path, bool]:
    """The module of a variable, and whether it belongs to the cached rows of its table."""
    return path[:-1], str(path[-1]).startswith(_OF_ROWS)


def used_flags(paths: Iterable[Path]) -> list[Path]:
    """The ``used`` flags of tables."""
    return [path for path in paths if path[-1] in _USED]


def _known(values: Mapping[Path, Any]) -> dict[Path, np.ndarray]:
    """The values that can be read on the host now, in one transfer."""
    return jax.device_get(
        {
            path: value
            for path, value in values.items()
            if not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)
        }
    )


def _is_unused(used: Any) -> Any:
    """A bool, or an array if it is traced or differs between the layers of a stack of tables."""
    unused = used == 0
    if isinstance(unused, jax.Array):
        return unused
    return bool(unused.all()) if unused.all() or not unused.any() else unused


def _either(unused: Any, old: Any, new: Any) -> Any:
    def choose(old: Any, new: Any) -> jax.Array:
        # Assumes that tables are stacked along the leading axes; otherwise the choice is for the whole stack.
        mask = jnp.asarray(unused if new.shape[: unused.ndim] == unused.shape else unused.all())
        if mask.ndim:
            mask = jnp.broadcast_to(jnp.expand_dims(mask, range(mask.ndim, new.ndim)), new.shape)
        return jax.lax.select(mask, jnp.asarray(old), new)

    return jax.tree.map(choose, old, new)


def _check_sentinel(
    caller: str, path: Path, sentinel: np.ndarray, unused: bool | np.ndarray
) -> None:
    moved = np.ravel(sentinel)[~np.ravel(sentinel_untouched(sentinel) | unused)]
    if moved.size == 0:
        return
    table = ".".join(map(str, path[:-1]))
    where = f"fused table '{table}'" if table else "the fused tables"
    hint = _ZEROS if moved[0] == 0 else _NAN if np.isnan(moved[0]) else _MOVED
    raise ValueError(
        f"{caller}: grads of {where} are not next values: the sentinel is {moved[0]!s}, expected 1. {hint}"
    )


_ZEROS = "An earlier step overwrote the table with zeros, as its loss did not use it: restore it from a checkpoint."
_NAN = "An earlier update under jit was given gradients that were no next values: restore it from a checkpoint."
_MOVED = (
    "The table or collection was used more than once in the loss, the loss has a term over its arrays, or its next "
    "values were summed, scaled or clipped: look all ids of a shared table up in one call, restrict penalties to "
    "ordinary parameters and give the table's optimizer a weight_decay, update after every micro-batch, pass a loss "
    "scale to the layer as grad_scale, or build the layer with optimizer=None and let optax step it."
)


_COMBINED = (
    "gradients of a model with fused tables: they carry the next values of the tables, which are neither summed nor "
    "averaged nor compared, and do not pass through jit, scan or cond as arguments, carries or results. Update after "
    "every micro-batch and put optax.MultiSteps into tx; compute the gradients and update in the same jitted function."
)


class NextValues:
    """The "cotangents" of fused tables: static data of a pytree whose leaves are the ordinary gradients.

    Args:
        old: the arrays that the loss was differentiated at, by path.
        by_path: their next values.
        loss: what its backward pass did.
        model: the name of the model in ``loss``.
        ordinary: for error messages, an expression for the parameters without fused tables.

    Raises:
        ValueError: the loss depends on arrays not only through one lookup, as far as the trace shows it, or without
            any lookup.

    JAX compares static data where it combines two trees, and where a tree is an argument or a carry of a compiled
    function. The comparison raises, since the arrays of one of the two would be dropped.

    Next values that nothing takes are reported when they are dropped, once: the tables are not trained then.
    """

    # Of an object whose constructor has raised.
    _untaken = ""

    def __init__(
        self,
        old: Mapping[Path, Any],
        by_path: Mapping[Path, Any],
        loss: Loss,
        model: Any,
        ordinary: str,
    ) -> None:
        reached = loss.reached[model]
        if alone := without_lookup(old, reached):
            raise ValueError(
                f"value_and_grad: the loss reads {names_of(alone)} of fused tables, but looks up nothing in them. Only "
                "a lookup trains a fused table, and this gradient would be lost. Build the layer with optimizer=None "
                "and let optax step it, e.g. where it is the output weights of a model; give the rule a weight_decay "
                "instead of adding a penalty to the loss, also one with a coefficient of 0; or read "
                "jax.lax.stop_gradient(array) for what is not to be trained."
            )
        if terms := loss.with_other_terms(old, by_path):
            raise ValueError(
                f"value_and_grad: the loss depends on {names_of(terms)} of fused tables not only through one lookup, "
                "and JAX adds the other gradient to their next values. Restrict penalties to ordinary parameters, "
                f"{ordinary}, and give the optimizer of a table a weight_decay; look up all ids of a table in one "
                "call. A coefficient of 0 does not take a penalty out of the trace; leave the term out."
            )
        self.by_path = dict(by_path)
        self.start = Start(old)
        stepped = reached.intersection(used_flags(old))
        self._untaken = names_of([path[:-1] or ("the model itself",) for path in stepped])
        self._trace = get_opaque_trace_state()

    def take(self) -> NextValues:
        """These, of which nothing is reported any more."""
        self._untaken = ""
        return self

    def __del__(self) -> None:
        # After a trace has raised, its frames are dropped outside of it.
        if not self._untaken or sys.is_finalizing() or get_opaque_trace_state() != self._trace:
            return
        message = (
            f"the next values of the fused tables {self._untaken} were computed, but never taken, so that nothing "
            "trains these tables: nnx.Optimizer and optax see other parameters alone. Give the gradients to "
            "jax_tt.FusedOptimizer.update, in linen to jax_tt.linen.TrainState.apply_gradients. If a table is not to "
            "be trained, set layer.frozen = True, or pass what the layer returns through jax.lax.stop_gradient. This "
            "warning is issued once."
        )
        reports.warn_once(("next values", self._untaken), message, RuntimeWarning)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise TypeError(_COMBINED)

    def __hash__(self) -> int:
        raise TypeError(_COMBINED)

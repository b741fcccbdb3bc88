"""What the backward pass of one loss does to fused tables, as far as the trace shows it.

The next values of two lookups, or of a lookup and another term of the loss, would be added. The update refuses some of
these sums by the sentinel, but in a compiled step only when it runs; here they are refused when the loss is traced.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tt._lookup.shared import Shared, is_shared
from jax_tt._table.groups import Call
from jax_tt._table.options import NeededCotangents

Name = TypeVar("Name")


class TracedInsertion:
    """An insertion of keys in a loss.

    Attributes:
        earlier: the insertion whose result it changes.
        lost: whether its cotangent lacks the rows of another insertion, unless it is the cotangent of a later one.
    """

    def __init__(self) -> None:
        self.earlier: TracedInsertion | None = None
        self.lost = False

    def misses_rows(self) -> bool:
        """Whether the cotangent of this insertion lacks rows; called in the order of the backward pass."""
        if self.earlier is not None:
            self.earlier.lost = self.lost
        return self.lost


class Loss:
    """The fused tables that the backward pass of a loss has stepped so far.

    It holds the arrays by whose ids it knows them, so that no other array gets such an id.
    """

    def __init__(self) -> None:
        self.sentinels: dict[int, Any] = {}
        self.insertions: dict[int, tuple[Any, TracedInsertion, bool]] = {}
        self._next: dict[int, tuple[Any, Any]] = {}
        self.reached: defaultdict[Any, set[Any]] = defaultdict(set)

    def watch(self, model: Any, arrays: Mapping[Any, Any]) -> dict[Any, Any]:
        """The arrays of a model by name; ``reached[model]`` are those that the backward pass has a cotangent for."""
        return watched(arrays, self.reached[model])

    def add(self, arrays: Any, next_values: Any) -> None:
        """Notes what the backward pass of a lookup returns for the arrays that it was given."""
        for array, value in zip(jax.tree.leaves(arrays), jax.tree.leaves(next_values), strict=True):
            self._next[id(array)] = array, value

    def with_other_terms(
        self, arrays: Mapping[Name, Any], cotangents: Mapping[Name, Any]
    ) -> list[Name]:
        """The names of arrays for which JAX has added something to what lookups returned.

        It is unknown of arrays that lookups were not given themselves, such as those of a lookup inside a ``scan`` or
        another ``jit``.
        """
        return [
            name
            for name in cotangents
            for array, value in zip(
                jax.tree.leaves(arrays[name]), jax.tree.leaves(cotangents[name]), strict=True
            )
            if self._next.get(id(array), (None, value))[1] is not value
        ]


_loss: ContextVar[Loss | None] = ContextVar("loss", default=None)


@contextlib.contextmanager
def one_loss() -> Iterator[Loss]:
    """A context in which one loss is differentiated."""
    token = _loss.set(loss := Loss())
    try:
        yield loss
    finally:
        _loss.reset(token)


def begin_insertion(before: Any) -> TracedInsertion:
    """A new insertion into a table, of which ``before`` is an array that it changes."""
    new, loss = TracedInsertion(), _loss.get()
    if loss is None:
        return new
    if id(before) in loss.insertions:
        _, earlier, returned = loss.insertions[id(before)]
        earlier.lost = True
        if returned:
            new.earlier = earlier
        else:
            new.lost = True  # it begins without the rows of the earlier one
    loss.insertions[id(before)] = before, new, False
    return new


def end_insertion(insertion: TracedInsertion, after: Any) -> None:
    """Notes what `begin_insertion` is given where this array is changed again."""
    loss = _loss.get()
    if loss is not None:
        loss.insertions[id(after)] = after, insertion, True


def check_first_use(
    calls: Sequence[Call], shared: Shared | None, wanted: Sequence[NeededCotangents], gs: Any
) -> None:
    """Raises if the backward pass of this loss has stepped one of the tables before.

    Args:
        calls, shared: of the lookup.
        wanted: the cotangents of every call.
        gs: gradients of the sums, one of all or one per call; None for sums that the loss does not use.
    """
    loss = _loss.get()
    if loss is None:
        return
    own: dict[int, Any] = {}
    for k, call in enumerate(calls):
        table, g = call.use.table, gs[k] if isinstance(gs, tuple | list) else gs
        if g is None or not wanted[k].names or table.update is None:
            continue
        sentinel = shared.sentinel if shared and is_shared(table) else call.state["sentinel"]
        if id(sentinel) in loss.sentinels:
            raise ValueError(
                f"{table.ids.label}the loss looks up this fused table more than once, and next values cannot be added. "
                "Look up all ids in one call, as one batch or as features of one collection, or drop optimizer= to "
                "train the table with optax."
            )
        own[id(sentinel)] = sentinel
    loss.sentinels.update(own)


def note_next_values(
    calls: Sequence[Call], cotangents: Sequence[Call], together: Iterable[tuple[Any, Any]]
) -> None:
    """Notes for `Loss.with_other_terms` what the backward pass of a lookup returns.

    Args:
        calls, cotangents: of the lookup.
        together: arrays that the tables of the calls have together, and their cotangents, None if there is none.
    """
    loss = _loss.get()
    if loss is None:
        return
    for call, new in zip(calls, cotangents, strict=True):
        if call.use.table.update is not None:
            stepped = {name: value for name, value in new.state.items() if value is not None}
            loss.add({name: call.state[name] for name in stepped}, stepped)
    for arrays, after in together:
        if after is not None:
            loss.add(arrays, after)


def watched(arrays: Mapping[Name, Any], reached: set[Name]) -> dict[Name, Any]:
    """Identity on arrays, or trees of them, by name.

    A backward pass adds to ``reached`` the name of each that has a cotangent other than a zero that JAX knows.
    """
    leaves, structure = jax.tree.flatten(dict(arrays))
    names = [name for name, tree in arrays.items() for _ in jax.tree.leaves(tree)]

    def note(k: int) -> None:
        reached.add(names[k])

    return jax.tree.unflatten(structure, _watched.bind(*leaves, note=note))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, note: Callable[[int], None]) -> Any:
    live = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    passed = _watched.bind(*(tangents[k] for k in live), note=lambda k: note(live[k]))
    after = dict(zip(live, passed, strict=True))
    # The primals as they are: others know them by their identity.
    return list(primals), [after.get(k, tangent) for k, tangent in enumerate(tangents)]


def _transpose(cotangents: Sequence[Any], *_: Any, note: Callable[[int], None]) -> list[Any]:
    for k, cotangent in enumerate(cotangents):
        if not isinstance(cotangent, ad.Zero):
            note(k)
    return list(cotangents)


def _identity(*arrays: Any, note: Callable[[int], None]) -> list[Any]:
    del note
    return list(arrays)


_watched = Primitive("jax_tt_watched")
_watched.multiple_results = True
_watched.def_impl(_identity)
_watched.def_abstract_eval(_identity)
ad.primitive_jvps[_watched] = _jvp
ad.primitive_transposes[_watched] = _transpose
batching.primitive_batchers[_watched] = lambda arrays, axes, *, note: (
    _watched.bind(*arrays, note=note),
    axes,
)
mlir.register_lowering(_watched, lambda _, *arrays, note: arrays)

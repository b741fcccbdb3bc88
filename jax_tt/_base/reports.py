"""Ids out of range that ``bounds="warn"`` found, and keys without a row, as Python warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable

_SEPARATOR = "\x1f"
# Whose lines say nothing to the reader of a warning.
_LIBRARIES = ("jax_tt", "jax", "flax", "contextlib", "functools", "threading")
_reported: dict[Hashable, object] = {}


class OutOfRangeWarning(UserWarning):
    """Ids outside a table, or bags that do not fit their ids, were looked up with ``bounds="warn"``; issued once per
    table.

    >>> import warnings, jax_tt
    >>> warnings.simplefilter("ignore", jax_tt.OutOfRangeWarning)
    """


class MissingKeyWarning(UserWarning):
    """Keys without a row were trained on, or found no room, in a `HashTable` with ``safe_check="warn"``; each is
    reported once per table. Or a table has lost keys on its way to other devices or another capacity, which is reported
    every time.

    >>> import warnings, jax_tt
    >>> warnings.simplefilter("ignore", jax_tt.dynamic.MissingKeyWarning)
    """


def report_native(
    table: str, num_embeddings: int, count: int, first: str, position: int, message: str
) -> None:
    """A report of a native op: with a message, of keys, which it counts, or of offsets; else `report`."""
    if message and count:
        report_missing(message, count)
    elif message:
        report_offsets(message)
    else:
        report(table, num_embeddings, count, first, position)


def shard_label(table: str, num_embeddings: int) -> str:
    """What a native op calls a shard of a table, from which `report` knows the table and all of its rows."""
    return f"{table}{_SEPARATOR}{num_embeddings}"


def report_missing(message: str, count: int) -> None:
    """Warns about keys without a row, once for every message, with the count in place of ``{count}``; never raises."""
    warn_once(message, message.replace("{count}", str(count)), MissingKeyWarning)


def report_moved(label: str, evicted: int, forgotten: int) -> None:
    """Warns about keys that found no room where a table has moved, once for every move."""
    lost = [f"{evicted} of its keys, with the lowest scores"] if evicted else []
    if forgotten:
        lost.append(f"the counts of {forgotten} of the keys that wait for admission")
    message = (
        f"{label}state: the table has moved to other devices or another capacity, and lost {' and '.join(lost)}, for "
        "which its sets have no room. safe_check='ignore' says nothing."
    )
    warnings.warn(message, MissingKeyWarning, level_of_caller())


def once_per(tables: str, label: str) -> str:
    """A label of offsets from which `report_offsets` knows the tables that they are of."""
    return f"{tables}{_SEPARATOR}{label}"


def label_alone(label: str) -> str:
    """What errors say of a label of `once_per`."""
    return label.rpartition(_SEPARATOR)[2]


def report_offsets(wrong: str) -> None:
    """Warns that offsets are malformed, once per tables of the label that ``wrong`` begins with; never raises."""
    tables, _, wrong = wrong.rpartition(_SEPARATOR)
    message = (
        f"{wrong}. The bags of such a batch were cut so that they fit, and may have the ids of others. This warning is "
        "issued once per table. Bags.from_offsets and host_batch make bags that fit; bounds='zero' gives no warning, "
        "and bounds='error' raises an error."
    )
    warn_once(("offsets", tables), message, OutOfRangeWarning)


def report(table: str, num_embeddings: int, count: int, first: str, position: int) -> None:
    """Warns about ``count`` ids of a batch that are out of range, once per table; never raises.

    ``first`` is the first of these ids, as text, and ``position`` where it is in the batch.
    """
    table, _, rows = table.partition(_SEPARATOR)
    num_embeddings = int(rows or num_embeddings)
    name = f"table {table!r}" if table else "a table"
    found = f"{first} at position {position} is"
    if count > 1:
        found = f"{count} ids of a batch, the first of them {first} at position {position}, are"
    message = (
        f"{found} out of range for {name} of {num_embeddings} rows. Such ids contribute nothing and train nothing. "
        "This warning is issued once per table; a layer counts them in its variable out_of_range. Pass ids in "
        "[0, num_embeddings); bounds='zero' gives no warning, and bounds='error' raises an error."
    )
    warn_once((table, num_embeddings), message, OutOfRangeWarning)


def warn_once(key: Hashable, message: str, category: type[Warning]) -> None:
    """Warns unless a warning with this key has been issued; never raises."""
    # One step without a lock: the main thread may be led here by a native op while it is here for another reason, and a
    # forked process would inherit the lock of a thread that it has not got.
    mine = object()
    if _reported.setdefault(key, mine) is not mine:
        return
    _without_raising(lambda: warnings.warn(message, category, level_of_caller()))


def level_of_caller() -> int:
    """The ``stacklevel`` of the line outside of the libraries that led here; 1 in a thread that none of them did."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return 1 if frame is None else level


def forget() -> None:
    """Reports every table again."""
    _reported.clear()


def _without_raising(call: Callable[[], None]) -> None:
    """An exception goes to ``sys.unraisablehook``: a filter may turn warnings into errors, which would stop a step, or
    whatever the main thread happens to run."""

    class Call:
        def __del__(self) -> None:  # the one place in Python where exceptions go there
            call()

    Call()

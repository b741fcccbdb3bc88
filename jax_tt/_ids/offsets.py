"""The offsets of bags where they enter a program.

They start at 0, never fall, and end at or below the number of ids. All that is computed of them, such as the part of a
feature or the bags of several features together, relies on this, and could make valid offsets of others. So they are
looked at as they were given, once, for every method and platform.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_tt._base import ffi, reports
from jax_tt._base.arguments import as_array, mismatch, narrow
from jax_tt._ids.batch import Batch, padding_mark, with_marks
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._jax.backend import choose, run
from jax_tt._jax.vma import vary_over, varying_axes

# The first offset of bags that were padded, joined or cut after their offsets were malformed; no cut of it is
# well-formed.
MALFORMED = -(2**31)
VMAP = "Extra leading dimensions go through jax.vmap."


class Treatment(NamedTuple):
    """What is done about malformed offsets.

    Attributes:
        bounds: as in `Lookup`. ``"error"`` refuses the batch, ``"unchecked"`` does nothing, and all others repair the
            offsets: each is raised to the one before and lowered to the number of ids, and the first one is 0.
        method: as in `Lookup`.
        quiet: whether an error must not be raised, as other devices would wait for the one that has raised it.
    """

    bounds: str
    method: str = "auto"
    quiet: bool = False


class Given(NamedTuple):
    """Offsets ``[B + 1]`` of any integers, of bags of ``capacity`` ids; a label of `reports.once_per`."""

    label: str
    offsets: Any
    capacity: Any


def entered_offsets(given: Sequence[Given], how: Treatment) -> tuple[list[Any], jax.Array | None]:
    """Well-formed offsets in int32, and whether the batch is refused, bool; None where that is known not to be.

    A batch is refused where no error can be raised. All its results must be NaN, and nothing may be stepped, inserted
    or counted. Its bags are empty.

    Raises:
        ValueError: offsets of numpy are malformed and ``bounds`` is ``"error"``. Native operations raise the error of
            others.
    """
    on_host = [isinstance(one.offsets, np.ndarray) for one in given]
    offsets: list[Any] = [
        _on_host(one, how.bounds) if known else narrow(one.offsets)
        for one, known in zip(given, on_host, strict=True)
    ]
    rest = [one for one, known in zip(given, on_host, strict=True) if not known]
    if not rest or how.bounds == "unchecked":
        return offsets, None
    arrays = tuple(array for array, known in zip(offsets, on_host, strict=True) if not known)

    call = partial(_entered, how, tuple(one.label for one in rest))
    specs = tuple(map(spec_of, arrays)), P()
    # Capacities may be symbolic.
    capacities = jnp.stack([jnp.asarray(one.capacity, jnp.int32) for one in rest])
    after, refused = over_explicit_axes(call, (arrays, capacities), specs)
    following = iter(after)
    offsets = [
        array if known else next(following) for array, known in zip(offsets, on_host, strict=True)
    ]
    return offsets, refused if how.bounds == "error" else None


def entered_batches(
    batches: Sequence[Batch], labels: Sequence[str], how: Treatment
) -> tuple[list[Batch], jax.Array | None]:
    """Batches of bags with well-formed offsets, and whether they are refused, as `entered_offsets` returns it."""
    ragged = [k for k, batch in enumerate(batches) if not batch.rectangular]
    given = [Given(labels[k], batches[k].offsets[0], batches[k].capacity) for k in ragged]
    offsets, refused = entered_offsets(given, how)
    result = list(batches)
    for k, array in zip(ragged, offsets, strict=True):
        result[k] = dataclasses.replace(result[k], offsets=jnp.asarray(array)[None])
    return result, refused


def any_refused(flags: Iterable[jax.Array | None]) -> jax.Array | None:
    """Whether any part of a call is refused, and so the call; None if none can be."""
    known = [flag for flag in flags if flag is not None]
    return functools.reduce(jnp.logical_or, known) if known else None


def well_formed(batch: Batch) -> Batch:
    """A batch of bags whose offsets have been entered with those of others."""
    return dataclasses.replace(batch, offsets=jnp.asarray(batch.offsets))


def without_ids_if(refused: jax.Array, batch: Batch) -> Batch:
    """A batch of which no position counts if the call is refused, whatever the bounds of its table."""
    if not batch.rectangular:
        return dataclasses.replace(batch, offsets=_empty_if(refused, batch.offsets))
    batch = batch if batch.padded else with_marks(batch)
    ids = jnp.where(refused, padding_mark(batch.ids.dtype), batch.ids)
    return dataclasses.replace(batch, ids=ids)


def _empty_if(refused: jax.Array, offsets: jax.Array) -> jax.Array:
    return jnp.where(refused, jnp.zeros_like(offsets), offsets)


def offsets_array(label: str, offsets: Any) -> Any:
    """Offsets ``[B + 1]`` of any integers as an array of numpy or JAX, whose values are not looked at."""
    array = as_array(label, offsets)
    if array.ndim != 1 or array.shape[0] == 0:
        raise mismatch(label, array, "[B + 1]", VMAP)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise mismatch(label, f"dtype {array.dtype}", "integers")
    return array


def refuse_malformed(label: str, offsets: Any, capacity: Any) -> None:
    """Raises for malformed offsets of numpy."""
    if isinstance(offsets, np.ndarray) and malformed(offsets, capacity):
        raise _error(Given(label, offsets, capacity))


def if_well_formed(computed: Any, offsets: Any, capacity: Any) -> Any:
    """``computed`` from traced offsets, or `MALFORMED` everywhere if they are malformed."""
    if isinstance(offsets, np.ndarray):
        return computed
    return jnp.where(malformed(offsets, capacity), MALFORMED, computed)


def lowered_to(offsets: jax.Array, count: int) -> jax.Array:
    """Offsets of ``count`` ids, to which padding is added, so that no bag has any of it.

    The first offset is `MALFORMED` where others had to be lowered: a lookup then refuses or repairs what would fit into
    the padding.
    """
    lowered = jnp.where(jnp.arange(offsets.shape[0]) == 0, MALFORMED, jnp.minimum(offsets, count))
    return jnp.where(jnp.any(offsets > count), lowered, offsets)


def malformed(offsets: Any, capacity: Any) -> Any:
    """Whether offsets ``[B + 1]`` start elsewhere than at 0, fall, or end beyond the capacity; a bool."""
    xp = np if isinstance(offsets, np.ndarray) else jnp
    falls = xp.any(offsets[1:] < offsets[:-1])
    return (offsets[0] != 0) | falls | (offsets[-1] > capacity)


def _on_host(one: Given, bounds: str) -> np.ndarray:
    offsets = narrow(one.offsets)
    if bounds == "unchecked" or not malformed(one.offsets, one.capacity):
        return offsets
    if bounds == "error":
        raise _error(one)
    if bounds == "warn":
        reports.report_offsets(_wrong(one, one.label))
    rest = np.maximum.accumulate(np.clip(offsets[1:], 0, one.capacity))
    return np.concatenate([np.zeros(1, np.int32), rest]).astype(np.int32)


def _error(one: Given) -> ValueError:
    wrong = _wrong(one, reports.label_alone(one.label))
    return ValueError(f"{wrong}. Bags.from_offsets checks the offsets that it makes bags of.")


def _wrong(one: Given, label: str) -> str:
    """What is wrong with malformed offsets of numpy that are called ``label``."""
    first, offsets = int(one.offsets[0]), one.offsets
    if first == MALFORMED:
        return (
            f"{label}[0] is {first}, expected 0: bags begin so if they were padded, joined or cut while their "
            "offsets did not fit their ids"
        )
    if first != 0:
        return (
            f"{label}[0] is {first}, expected 0: ids before the first offset would belong to no bag"
        )
    bad = (offsets[1:] < offsets[:-1]) | (offsets[1:] > one.capacity)
    at = int(np.flatnonzero(bad)[0])
    return (
        f"{label}[{at + 1}] is {offsets[at + 1]} after {offsets[at]}; expected offsets that never fall and end at "
        f"or below the capacity of {one.capacity} ids"
    )


def _entered(
    how: Treatment, labels: tuple[str, ...], inputs: tuple[tuple[jax.Array, ...], jax.Array]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    arrays, capacities = vary_over(inputs, varying_axes(inputs))
    how = how._replace(method=choose(how.method))
    native, plain = partial(_native, how, labels), partial(_plain, how, labels)
    return run(how.method, native, plain, arrays, capacities)


def _native(
    how: Treatment,
    labels: tuple[str, ...],
    platform: str,
    arrays: tuple[jax.Array, ...],
    capacities: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    raises = platform == "cpu" and not how.quiet
    if how.bounds != "warn":
        labels = tuple(map(reports.label_alone, labels))
    modes = {"error": "raise" if raises else "mark", "warn": "warn"}
    types = [jax.ShapeDtypeStruct(array.shape, jnp.int32) for array in (capacities, *arrays)]
    call = jax.ffi.ffi_call(ffi.target(platform, "bag_offsets"), types, vmap_method="broadcast_all")
    with jax.named_scope("bag_offsets"):
        refused, *offsets = call(
            capacities, *arrays, labels="\n".join(labels), mode=modes.get(how.bounds, "repair")
        )
    # JAX takes the results of a custom call to be the same on all devices.
    refused, offsets = vary_over((refused, offsets), varying_axes(arrays))
    if not raises:
        refused = jnp.any(refused != 0)
        if how.bounds == "error":
            offsets = [_empty_if(refused, array) for array in offsets]
        return tuple(offsets), refused
    # A constant, so that nothing is computed for a batch that is refused.
    return tuple(offsets), vary_over(jnp.zeros((), bool), varying_axes(refused))


def _plain(
    how: Treatment, labels: tuple[str, ...], arrays: tuple[jax.Array, ...], capacities: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    wrongs = [malformed(*pair) for pair in zip(arrays, capacities, strict=True)]
    if how.bounds == "error":
        refused = jnp.any(jnp.stack(wrongs))
        return tuple(_empty_if(refused, array) for array in arrays), refused
    # A program with a callback cannot be exported; "auto" makes none for platforms without the native operation.
    if how.bounds == "warn" and how.method == "reference":
        for label, array, capacity, bad in zip(labels, arrays, capacities, wrongs, strict=True):
            tell = partial(jax.debug.callback, partial(_tell, label))
            lax.cond(bad, tell, lambda *_: None, array, capacity)
    pairs = zip(arrays, capacities, wrongs, strict=True)
    repaired = (
        lax.cond(bad, _repaired, lambda offsets, _: offsets, offsets, capacity)
        for offsets, capacity, bad in pairs
    )
    return tuple(repaired), jnp.any(jnp.stack(wrongs))


def _tell(label: str, offsets: Any, capacity: Any) -> None:
    one = Given(label, np.asarray(offsets), int(capacity))
    # Under `vmap` both branches of a condition run.
    if malformed(one.offsets, one.capacity):
        reports.report_offsets(_wrong(one, label))


def _repaired(offsets: jax.Array, capacity: jax.Array) -> jax.Array:
    rest = lax.cummax(jnp.clip(offsets[1:], 0, capacity))
    return jnp.concatenate([jnp.zeros_like(offsets[:1]), rest])

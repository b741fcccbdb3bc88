"""Every entrance of the native modules refuses what is one above its limits."""

import copy

import jax
import numpy as np
import pytest

import jax_tt
from jax_tt._base import ffi
from tests.conftest import native_available
from tests.fuzz import raw
from tests.fuzz.calls import Call

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")

# Attributes of handlers, and the nearest value that no handler with them takes.
OUTSIDE = {
    "arrays": 4,
    "bags": 2**31,
    "bits": 17,
    "bounds": "other",
    "cores": 6,
    "devices": 2**31 - 1,
    "dim": 2**31,
    "hint": 2**31,
    "hot_terms": -1,
    "k": 2**31,
    "min_age": 0,
    "num_embeddings": -1,
    "optimizer": "Other",
    "policy": "other",
    "safe_check": "other",
    "size": 2**31,
    "terms": 0,
    "word_0": 2,
}
WITH_DIRECTORIES = [f"jax_tt_hash_{op}_v1" for op in ("tables_find", "tables_insert", "double")]


def refused(call: Call) -> bool:
    try:
        call.run()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert "INVALID_ARGUMENT" in str(error), error
        return True
    return False


def in_wider_sets(call: Call) -> Call | None:
    """The same operation on directories with sets of 65 keys."""
    if call.target not in WITH_DIRECTORIES:
        return None
    wide = copy.deepcopy(call)
    for k, array in enumerate(wide.args):
        if array.ndim == 3 or (array.ndim == 2 and array.dtype == np.int32):
            raw._set_arg(wide, k, np.zeros((*array.shape[:-1], 65), array.dtype))
    if not wide.aliases and len(wide.results) == len(wide.args):  # twice the sets
        for k, array in enumerate(wide.args[:3]):
            wide.results[k] = raw.result_type((2 * len(array), *array.shape[1:]), array.dtype)
    return wide


def test_handlers():
    """Calls as the library makes them, with one number changed."""
    rng, seen = np.random.default_rng(0), set()
    with jax.enable_x64(True):
        for builder in raw.BUILDERS:
            for _ in range(12):
                call = builder(rng)
                wide = in_wider_sets(call)
                if wide is not None and (call.target, "ways") not in seen:
                    seen.add((call.target, "ways"))
                    assert refused(wide), call.target
                attributes = next(
                    (own for own in call.attributes.values() if isinstance(own, dict)),
                    call.attributes,
                )
                for name in attributes.keys() & OUTSIDE.keys():
                    if (call.target, name) in seen:
                        continue
                    seen.add((call.target, name))
                    outside = OUTSIDE[name]
                    outside = outside if isinstance(outside, str) else np.int64(outside)
                    before, attributes[name] = attributes[name], outside
                    assert refused(call), f"{call.target}: {name} = {outside}"
                    attributes[name] = before
    targets = {target for target, _ in seen}
    assert len(targets) > 20 and {name for _, name in seen} == {*OUTSIDE, "ways"}


def words(*shape):
    return np.zeros(shape, np.uint32)


def insertion(sets=2, ways=4, n=3, policy="lru", **changed):
    """Arguments of `hash_insert_here`."""
    given = {
        "keys": words(sets, 2, ways),
        "scores": words(sets, 2, ways),
        "touched": np.zeros((sets, ways), np.int32),
        "batch": words(n, 2),
        "present": np.ones(n, bool),
        "given": words(n if policy == "custom" else 0, 2),
        "now": 1,
        "policy": policy,
        "slots": np.zeros(n, np.int32),
        "inserted": words(n, 2),
        "old_keys": words(n, 2),
        "old_touched": np.zeros(n, np.int32),
        "counts": np.zeros(7, np.int32),
        "found": np.zeros(n, np.int32),
    }
    return tuple((given | changed).values())


def initial(n=3, columns=8, kind="float32", **changed):
    """Arguments of `hash_initial_here`."""
    values = jax_tt.dynamic.Normal(0.1)
    given = {
        "seed": words(2),
        "quantiles": values.quantiles,
        "factor": values.factor,
        "signed": True,
        "keys": words(n, 2),
        "wanted": np.ones(n, bool),
        "type": kind,
        "rows": np.zeros((n, columns), np.uint8),
    }
    return tuple((given | changed).values())


def searched(rows=2, columns=3, terms=2, size=4, beam=4, sweeps=1, codes=None):
    """Arguments of `choose_sums`."""
    books = np.zeros((terms, size, columns), np.float32)
    codes = np.zeros((rows, terms), np.int32) if codes is None else codes
    return np.zeros((rows, columns), np.float32), books, beam, sweeps, codes


TT = [8, 7], [2, 3], [1, 3, 1]
MOST = 2**31 - 1


def test_functions_of_the_module():
    module = ffi.load("cpu")
    assert module is not None
    keys, numbers = np.arange(3, dtype=np.uint64), np.zeros(3, np.int64)
    index = module.KeyIndex()
    many = np.empty(MOST + 1, bool)  # memory that is never touched
    valid = [
        (module.hash_insert_here, insertion()),
        (module.hash_insert_here, insertion(ways=64, policy="custom")),
        (module.hash_initial_here, initial()),
        (module.choose_sums, searched()),
        (module.plan_size, (*TT, 56, MOST, MOST)),
        (module.copy_rows, (keys[:0], keys[:0], 0)),
        (module.add_checksums, (np.zeros((3, 5), np.uint8), keys[:2], keys.copy())),
        (index.set, (keys, numbers, numbers.copy())),
    ]
    for function, given in valid:
        function(*given)
    above = [
        *((module.hash_insert_here, insertion(ways=ways)) for ways in (0, 65, 72, 256)),
        (module.hash_insert_here, insertion(policy="other")),
        (module.hash_insert_here, insertion(sets=0)),
        (module.hash_insert_here, insertion(touched=np.zeros((2, 5), np.int32))),
        (module.hash_insert_here, insertion(scores=words(2, 2, 3))),
        (module.hash_insert_here, insertion(batch=words(2, 2))),
        (module.hash_insert_here, insertion(inserted=words(2, 2))),
        (module.hash_insert_here, insertion(policy="custom", given=words(2, 2))),
        (module.hash_insert_here, insertion(counts=np.zeros(6, np.int32))),
        (module.hash_insert_here, insertion(present=many)),
        (module.hash_initial_here, initial(wanted=many)),
        (module.hash_initial_here, initial(columns=7)),
        (module.hash_initial_here, initial(kind="int8")),
        (module.hash_initial_here, initial(seed=words(3))),
        (module.hash_initial_here, initial(rows=np.zeros((4, 8), np.uint8))),
        *((module.choose_sums, searched(beam=beam)) for beam in (0, 5)),
        (module.choose_sums, searched(sweeps=-1)),
        (module.choose_sums, searched(size=0)),
        (module.choose_sums, searched(codes=np.zeros((2, 3), np.int32))),
        *((module.plan_size, (*TT, 56, *sizes)) for sizes in ((-1, 1), (MOST + 1, 1), (1, -1))),
        (module.plan_size, (*TT, 57, 1, 1)),
        (module.plan_size, ([2] * 6, [2] * 6, [1] * 7, 64, 1, 1)),
        (module.plan_size, ([2, 2], [2**16, 2**15], [1, 1, 1], 4, 1, 1)),
        (module.copy_rows, (keys, keys[:2], 8)),
        (module.copy_rows, (keys, keys, -1)),
        (module.write_rows, (-1, keys, 0)),
        (module.add_checksums, (np.zeros((3, 5), np.uint8), keys[:1], keys.copy())),
        (module.add_checksums, (np.zeros((4, 5), np.uint8), keys[:2], keys.copy())),
        (index.set, (keys, numbers - 1, numbers.copy())),
        (index.set, (keys, numbers, numbers[:2].copy())),
        (index.find_into, (keys, numbers[:2].copy())),
        (index.erase, (keys, numbers[:2].copy())),
    ]
    for k, (function, given) in enumerate(above):
        with pytest.raises(ValueError):
            function(*given)
            print(f"call {k} of {function.__name__} was not refused")

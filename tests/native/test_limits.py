"""Every entrance of the native modules refuses what is one above its limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jax_tt
from jax_tt._base import ffi
from tests.conftest import native_available
from tests.native.shape_calls import error_of

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")

MOST = 2**31 - 1
Sizes = dict[str, Any]
# Of small calls that differ from what handlers take in nothing but what a case changes.
SIZES: Sizes = {
    "n": 4,
    "G": 1,
    "B": 2,
    "N": 5,
    "D": 4,
    "bounds": "zero",
    "optimizer": "Sgd",
    "hint": 4,
    "cores": 2,
    "p": 8,
    "q": 2,
    "r": 3,
    "packed": False,
    "bits": 8,
    "dim": 4,
    "terms": 1,
    "hot": 0,
    "w": 4,
    "S": 2,
    "W": 4,
    "E": 2,
    "R": 2,
    "policy": "lru",
    "age": 1,
    "check": "ignore",
    "word": -1,
    "arrays": 1,
    "k": 3,
    "devices": 2,
    "size": 3,
    "bags": 2,
}
BATCH = "s32[1,n] s32[G,B+1] f32[0]"
CORES = "f32[p,1,q,r] f32[7,r,3,1]"
STEPS = "f32[1] f32[2] u32[2]"
CODES = "u8[N,1] u8[0,0] u32[0,17] f32[2**8,w]"
QUERIES = "f32[1,D] s32[1,0] pred[0]"
GHOSTS = "s32[E,R] s32[E,R] s32[E,R] s32[E,R]"


def lookup(s: Sizes) -> Sizes:
    return {"split": False, "padded": False, "bounds": s["bounds"], "table": "t"}


def step(s: Sizes) -> Sizes:
    return {"optimizer": s["optimizer"], "skip_nonfinite": False, "stochastic_rounding": False}


def shape(s: Sizes) -> Sizes:
    """A table by its factors and ranks."""
    more = s["cores"] - 1
    columns, ranks = [s["q"], *[3] * more], [1, *[s["r"]] * more, 1]
    rows = {"row_factors": [s["p"], *[7] * more], "num_embeddings": s["N"]}
    return rows | {"col_factors": columns, "ranks": ranks}


def planned(s: Sizes) -> Sizes:
    return shape(s) | lookup(s) | {"hint": s["hint"], "resharded": False}


def train(s: Sizes) -> Sizes:
    """A table by its cores."""
    sizes = {"cores": s["cores"], "num_embeddings": s["N"], "hint": s["hint"]}
    return lookup(s) | sizes | {"resharded": False}


def dense(s: Sizes) -> Sizes:
    return lookup(s) | ({"bits": s["bits"], "dim": s["dim"]} if s["packed"] else {})


def codes(s: Sizes) -> Sizes:
    return {"bits": s["bits"], "terms": s["terms"], "hot_terms": s["hot"]}


def rows(s: Sizes) -> Sizes:
    return {"k": s["k"]} | ({"bits": s["bits"], "dim": s["dim"]} if s["packed"] else {})


def keys(s: Sizes) -> Sizes:
    return {"safe_check": s["check"], "message": "", "absent": -1}


def entry(s: Sizes) -> Sizes:
    return keys(s) | {"policy": s["policy"], "min_age": s["age"]}


def clocks(s: Sizes) -> Sizes:
    words = {f"word_{k}": s["word"] for k in range(s["arrays"])}
    return {"arrays": s["arrays"], "last": 90, "kept": 40} | words


def routes(s: Sizes) -> Sizes:
    return {key: s[key] for key in ("devices", "size", "bags")}


def of_tables(attributes: Callable[[Sizes], Sizes], tables: int = 1) -> Callable[[Sizes], Sizes]:
    return lambda s: (
        {"caller": "a test", "columns": []} | {str(k): attributes(s) for k in range(tables)}
    )


# Arguments and results, of which "=1" is the argument 1 in place, and attributes of each handler.
BACKWARD = f"{BATCH} f32[1,B,D] f32[N,D]"
HANDLERS: dict[str, tuple[str, str, Callable[[Sizes], Sizes]]] = {
    "plan": ("s32[1,n] s32[G,B+1] f32[]", "s32[0]", planned),
    "forward": (f"{BATCH} f32[] {CORES}", "f32[1,B,q*3] s32[0] f32[0]", of_tables(train)),
    "backward": (
        f"{BATCH} s32[0] f32[0] f32[1,B,q*3] {CORES}",
        f"s32[p+7] f32[0] {CORES}",
        of_tables(train),
    ),
    "update": (
        f"{STEPS} f32[1,B,q*3] {BATCH} s32[0] f32[0] f32[1,B,q*3] {CORES}",
        "f32[1] f32[0] =10 =11",
        of_tables(lambda s: train(s) | step(s)),
    ),
    "apply": (
        f"{STEPS} s32[p+7] {CORES} {CORES}",
        "f32[1] =4 =5",
        of_tables(lambda s: train(s) | step(s)),
    ),
    "dense_forward": (f"{BATCH} f32[] f32[N,D]", "f32[1,B,D]", of_tables(dense)),
    "dense_backward": (BACKWARD, "f32[0] f32[N,D]", of_tables(dense)),
    "dense_backward of two": (
        f"{BACKWARD} {BACKWARD}",
        "f32[0] f32[N,D] f32[0] f32[N,D]",
        of_tables(dense, 2),
    ),
    "dense_update": (
        f"{STEPS} f32[1,B,D] {BATCH} f32[1,B,D] f32[N,D]",
        "f32[1] f32[0] =8",
        of_tables(lambda s: dense(s) | step(s)),
    ),
    "coded_forward": (
        f"{BATCH} f32[] {CODES}",
        "f32[1,B,w]",
        of_tables(lambda s: lookup(s) | codes(s)),
    ),
    "cache_probe": ("s32[S,W] s32[n]", "s32[n]", lambda s: {}),
    "cache_observe": (
        f"s32[n] s32[n] s32[] s32[] s32[S,W] s32[S,W] s32[S,W] {GHOSTS}",
        "s32[4] =5 =6 =7 =8 =9 =10",
        lambda s: {"policy": s["policy"]},
    ),
    "cache_populate": (
        f"s32[] s32[S,W] s32[S,W] s32[S,W] {GHOSTS}",
        "s32[S,W] s32[4] =1 =2 =3 =4 =5 =6 =7",
        lambda s: {},
    ),
    "cache_forward": (
        f"s32[n] f32[S,q*3] f32[] {BATCH} f32[] {CORES}",
        "f32[1,B,q*3] s32[1,n] s32[1,B+1] f32[0] s32[0] s32[0] f32[0]",
        planned,
    ),
    "hash_tables_find": (
        "u32[S,2,W] s32[S,W] u32[n,2] pred[n] s32[0]",
        "s32[n]",
        of_tables(keys),
    ),
    "hash_tables_insert": (
        "u32[n,2] pred[n] u32[n,2] s32[] u32[] u32[S,2,W] u32[S,2,W] s32[S,W]",
        "s32[n] u32[n,2] u32[0,2] u32[0,2] s32[0] s32[7] s32[n] =5 =6 =7",
        of_tables(entry),
    ),
    "hash_tables_set_back": ("s32[] s32[S,W]", "=1", of_tables(clocks)),
    "hash_tables_set_back of five": (
        "s32[] s32[S,W] s32[S,W] s32[S,W] s32[S,W] s32[S,W]",
        "=1 =2 =3 =4 =5",
        of_tables(clocks),
    ),
    "hash_tables_initial": (
        "u32[2] s32[32,129] f32[] u32[n,2] pred[n]",
        "f32[n,D]",
        of_tables(lambda s: {"signed": True}),
    ),
    "hash_double": (
        "u32[S,2,W] u32[S,2,W] s32[S,W] f32[S*W,1]",
        "u32[2*S,2,W] u32[2*S,2,W] s32[2*S,W] f32[2*S*W,1]",
        lambda s: {},
    ),
    "route_bags": (
        "s32[n] s32[n] s32[n]",
        "s32[devices,size] s32[devices,size] s32[devices,bags+1] s32[1]",
        routes,
    ),
    "route_distinct": ("s32[n] s32[n]", "s32[n] s32[n] s32[n] s32[n]", routes),
    "scan_rows": (f"{QUERIES} f32[N,D]", "f32[1,k] s32[1,k]", rows),
    "scan_coded": (
        f"{QUERIES} {CODES}",
        "f32[1,k] s32[1,k]",
        lambda s: codes(s) | {"k": s["k"]},
    ),
    "scan_train": (
        f"f32[1,q*3] s32[1,0] pred[0] {CORES}",
        "f32[1,k] s32[1,k]",
        lambda s: shape(s) | {"k": s["k"]},
    ),
}
# Whose sizes are 64-bit numbers throughout: nothing but memory limits them.
WITHOUT_LIMITS = {"bag_offsets", "hash_tables_exchange", "hash_tables_reset"}
# Those of the CUDA module whose last result is the workspace.
WITH_WORKSPACE = {
    *("plan", "forward", "backward", "update", "apply"),
    *("dense_forward", "dense_backward", "dense_update"),
    *("cache_probe", "cache_observe", "cache_populate", "hash_tables_insert", "hash_double"),
}
BY_SHAPE = "plan cache_forward scan_train"
BY_CORES = "forward backward update apply"
POOLED = "dense_forward dense_backward dense_update coded_forward"
LOOKUPS = f"plan cache_forward forward backward update {POOLED}"
# Handlers, what is one above a limit, and words of the error.
BOTH: list[tuple[str, Sizes, str]] = [
    (f"{BY_SHAPE} {BY_CORES}", {"cores": 6}, "2 to 5 cores"),
    (f"{BY_SHAPE} {BY_CORES}", {"p": MOST + 1}, "factors"),
    (f"{BY_SHAPE} {BY_CORES}", {"q": MOST + 1}, "2^31 - 1 columns"),
    (f"{BY_SHAPE} {BY_CORES}", {"r": 2**40 // 6 + 1}, "2^40"),
    (f"{BY_SHAPE} {BY_CORES}", {"N": 57}, "num_embeddings"),
    (f"{BY_SHAPE} {BY_CORES}", {"N": -1}, "num_embeddings"),
    (LOOKUPS, {"n": MOST + 1}, "2^31 - 1 ids"),
    (LOOKUPS, {"B": MOST + 1}, "as many bags"),
    (LOOKUPS, {"G": 3}, "disagree on the number of groups"),
    (LOOKUPS, {"bounds": "other"}, "bounds"),
    ("update apply dense_update", {"optimizer": "Other"}, "Other"),
    ("dense_forward scan_rows", {"packed": True, "bits": 9}, "8, 4, 3 or 2 bits"),
    ("dense_forward scan_rows", {"packed": True, "dim": MOST + 1}, "dim"),
    ("coded_forward scan_coded", {"bits": 17}, "16 bits"),
    ("coded_forward scan_coded", {"terms": 0}, "terms"),
    ("coded_forward scan_coded", {"terms": 2}, "terms"),
    ("coded_forward scan_coded", {"hot": -1}, "terms"),
    ("coded_forward scan_coded", {"hot": 2}, "terms"),
    ("coded_forward scan_coded", {"w": 2**24 + 1}, "2**32 numbers"),
    ("cache_probe cache_observe cache_populate", {"S": MOST + 1, "W": 1}, "2^31 - 1 slots"),
    ("cache_observe cache_populate", {"S": 1, "E": MOST + 1}, "2^31 - 1 buckets"),
    ("cache_observe cache_populate", {"S": 1, "E": 1, "R": MOST + 1}, "2^31 - 1 places"),
    ("cache_probe", {"n": MOST + 1}, "2^31 - 1 ids"),
    ("cache_observe", {"policy": "other"}, "policy"),
    ("hash_tables_find hash_tables_insert hash_double", {"W": 65}, "sets of at most 64"),
    ("hash_tables_find hash_tables_insert", {"S": MOST + 1, "W": 1}, "2^31 - 1 slots"),
    ("hash_double", {"S": 2**30, "W": 1}, "2^31 - 1 slots"),
    ("hash_tables_find hash_tables_insert hash_tables_initial", {"n": MOST + 1}, "2^31 - 1 keys"),
    ("hash_tables_find hash_tables_insert", {"check": "other"}, "safe_check"),
    ("hash_tables_insert", {"policy": "other"}, "policy"),
    ("hash_tables_insert", {"age": 0}, "min_age"),
    ("hash_tables_set_back", {"word": 2}, "two words"),
    ("route_bags route_distinct", {"n": MOST + 1}, "2^31 - 1 ids"),
    ("route_bags route_distinct", {"devices": MOST}, "devices"),
    ("route_bags", {"size": MOST + 1}, "2^31 - 1 places"),
    ("route_bags", {"bags": MOST + 1}, "as many bags"),
    ("scan_rows scan_coded scan_train", {"k": MOST + 1}, "k must be"),
    ("scan_rows scan_coded scan_train", {"N": MOST + 1, "p": 2**29}, "2**31 - 1 rows"),
]
CASES: dict[str, list[tuple[str, Sizes, str]]] = {
    "cpu": [
        *BOTH,
        ("plan cache_forward forward backward update", {"hint": MOST + 1}, "hint"),
        ("cache_observe", {"n": MOST + 1}, "2^31 - 1 ids"),
    ],
    "cuda_emulated": [
        *BOTH,
        ("dense_forward dense_backward dense_update", {"D": 2**30 + 1}, "2^30 columns"),
        ("dense_forward", {"packed": True, "dim": 2**30 + 4, "D": 2**28 + 2}, "2^30 columns"),
        ("dense_backward of two", {"n": 2**30}, "ids of all tables"),
        ("dense_backward dense_update", {"N": 2**61, "D": 1}, "2^61 rows"),
        ("cache_observe", {"n": 2**30 + 1}, "2^30 ids"),
        ("hash_tables_insert", {"n": 2**30 + 1}, "2^30 keys"),
        ("hash_tables_set_back of five", {"arrays": 5}, "four arrays"),
    ],
}


def arrays(text: str, sizes: Sizes) -> list[Any]:
    """Types and shapes, or numbers of arguments."""
    found: list[Any] = []
    for one in text.split():
        dtype, _, dims = one.removesuffix("]").partition("[")
        known = tuple(eval(dim, {}, sizes) for dim in dims.split(",") if dim)
        found.append(int(one[1:]) if one[0] == "=" else (dtype, known))
    return found


@pytest.mark.parametrize("platform", CASES)
def test_handlers(platform):
    """Calls with shapes but no memory: a handler that takes what it must refuse ends the process."""
    module = ffi.load(platform)
    if module is None:
        pytest.skip(ffi.why_unavailable(platform))
    targets, seen = module.registrations(), set()
    for handlers, changed, expected in CASES[platform]:
        for name in re.findall(r"\w+(?: of \w+)?", handlers):
            handler, sizes = name.split()[0], SIZES | changed
            if (target := ffi.target(platform, handler)) not in targets:
                assert handler in HANDLERS
                continue
            args, rets, attributes = HANDLERS[name]
            workspace = handler in WITH_WORKSPACE and platform == "cuda_emulated"
            results = arrays(rets + " u8[0]" * workspace, sizes)
            print(name, changed, flush=True)  # which one ended the process
            error = error_of(targets[target], arrays(args, sizes), results, attributes(sizes))
            assert error is not None and expected in error, f"{name} with {changed}: {error}"
            seen.add(target)
    without = {ffi.target(platform, name) for name in WITHOUT_LIMITS}
    assert set(targets) <= seen | without


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
    refuses_all(module, above, {"instruction_set", "KeyIndex"})


def test_functions_of_the_cuda_module():
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(ffi.why_unavailable("cuda_emulated"))
    cache, many = (2, 4, 2, 2), MOST + 1
    assert module.workspace_size("forward", *TT, 4) and module.hash_workspace_size(
        "insert", 4, 2, 4
    )
    assert not module.hash_workspace_size("insert", 4, 2, 65)  # of what the handlers refuse
    above = [
        (module.plan_size, (*TT, 56, many, 1)),
        (module.plan_size, (*TT, 57, 1, 1)),
        (module.plan_size, ([2] * 6, [2] * 6, [1] * 7, 64, 1, 1)),
        (module.workspace_size, ("forward", *TT, many)),
        (module.workspace_size, ("other", *TT, 1)),
        (module.dense_workspace_size, ("forward", [5], [4], [many])),
        (module.dense_workspace_size, ("update", [5], [4], [-1])),
        (module.dense_workspace_size, ("update", [5, 5], [4, 4], [2**30, 2**30])),
        (module.dense_workspace_size, ("update", [2**61], [1], [4])),
        (module.dense_workspace_size, ("update", [5, 5], [4], [4])),
        (module.cache_workspace_size, ("observe", many, *cache)),
        (module.hash_workspace_size, ("insert", many, 2, 4)),
    ]
    seed = {"set_seed", "launches", "launch_counts", "clear_launch_counts"}
    refuses_all(module, above, {"tables_workspace_size", *seed})


def refuses_all(module: ModuleType, above: list[Any], without: set[str]) -> None:
    """Every function refuses its calls; of all functions, there are some but for those without limits."""
    for k, (function, given) in enumerate(above):
        with pytest.raises(ValueError):
            function(*given)
            print(f"call {k} of {function.__name__} was not refused")
    # Limits of rules are tested with them.
    without = {"registrations", "listen", "lists", "rules", "rule", "add_rule", *without}
    named = {function.__name__ for function, _ in above}
    assert {name for name in dir(module) if name[0] != "_"} <= named | without

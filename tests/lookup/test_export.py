"""`jax.export`: programs that run in a process that has run no op, symbolic batch sizes, and serialised pytrees."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from jax_tt._native import tt
from tests.conftest import native_available
from tests.helpers import SHAPES, assert_close, fused, make_case
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(not native_available(), reason="needs the CPU module")
SHAPE = SHAPES["d2"]
CASE = make_case(SHAPE, "float32", True)
BAGS = CASE.bags()
RULE = optimizers.Adagrad(0.1)
FUSED, STATE = fused(CASE.cores, RULE)
CACHE = jax_tt.RowCache(20, ways=4)
CACHED = jax_tt.tables.RowCachedTable(jax_tt.tables.TTTable.of(CASE.cores)[0], CACHE)
DENSE = jnp.arange(150.0).reshape(50, 3)
FUSED_DENSE, DENSE_STATE = fused(DENSE, RULE)


def export(function, *args, **options):
    return jax.export.export(jax.jit(function), disabled_checks=jax_tt.export.checks(), **options)(
        *args
    )


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def exported_by(code):
    """The names of a block that runs in this process, under the rules of promotion of a user."""
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, names)
    return names


@needs_native
@pytest.mark.slow
def test_a_process_that_has_run_no_op_calls_programs(tmp_path, monkeypatch):
    """After an import, which starts no backend; and the blocks of docs/serving.md that load what others exported."""
    monkeypatch.chdir(tmp_path)
    pool = partial(jax_tt.tt.embed_bag, method="native")
    Path("pool.bin").write_bytes(export(pool, CASE.cores, BAGS).serialize())
    np.savez("cores.npz", *CASE.cores)
    calling = """
import jax, jax_tt, numpy as np
from jax._src import xla_bridge

assert not xla_bridge._backends, "a backend was started"
pool = jax.export.deserialize(open("pool.bin", "rb").read())
cores = tuple(np.load("cores.npz").values())
bags = jax_tt.Bags.from_ragged(%r, %r, capacity=%d)
np.save("pooled.npy", pool.call(cores, bags))
"""
    calling %= (CASE.rows, CASE.weights, BAGS.capacity)
    text = (ROOT / "docs" / "serving.md").read_text()
    exporting, serving = python_blocks(text)[:2]
    exported_by(exporting)
    training, answering = python_blocks(text[text.index("## From two towers to ids") :])[:2]
    trained = exported_by(training)
    chosen = trained["small"].chosen
    assert chosen.nbytes * 15 <= trained["rows"].nbytes and chosen.quality > 0.6
    table, items = trained["small"].table, trained["arrays"]["items"]
    want = jax_tt.top_k(table, items, trained["queries"][:3], 10, exclude=trained["taken"][:3])[1]
    saving = "np.save('ids.npy', ids)\n"
    run_python(
        *("-c", calling + serving + answering + saving),
        folder=tmp_path,
        only=True,
        PATH="",
        JAX_PLATFORMS="cpu",
    )
    np.testing.assert_array_equal(np.load("pooled.npy"), pool(CASE.cores, BAGS))
    np.testing.assert_array_equal(np.load("ids.npy"), want)


def test_register():
    assert jax_tt.export.register() == tuple(p for p in ("cpu", "cuda") if native_available(p))


@needs_native
def test_checks_name_every_target():
    module = ffi.load("cpu")
    assert module is not None
    names = set(module.registrations())
    emulated = ffi.load("cuda_emulated")
    if emulated is not None:
        names |= {name.replace("_emulated_", "_") for name in emulated.registrations()}
    assert set(jax_tt.export.checks()) == {
        jax.export.DisabledSafetyCheck.custom_call(name) for name in names
    }


def test_pytrees_are_serialised():
    for value in (BAGS, CASE.bags("padded"), STATE, SHAPE.split_ids(np.arange(7))):
        exported = export(lambda tree: jax.tree.map(lambda leaf: leaf + leaf, tree), value)
        restored = jax.export.deserialize(exported.serialize())
        assert restored.in_tree == exported.in_tree and restored.out_tree == exported.out_tree
        doubled = restored.call(value)
        assert jax.tree.structure(doubled) == jax.tree.structure(value)
        np.testing.assert_array_equal(jax.tree.leaves(doubled)[0], 2 * jax.tree.leaves(value)[0])


def squares(op, table, *args, **options):
    return jax.grad(lambda table: jnp.sum(op(table, *args, **options) ** 2))(table)


def step(table, state, bags, method):
    return jax.grad(lambda s: jnp.sum(jax_tt.lookup_bags(table, s, bags, method=method)[0] ** 2))(
        state
    )


# A function of a method, a table and a batch, and these.
IDS = np.arange(48, dtype=np.int32).reshape(16, 3)
SYMBOLIC = {
    "split": (
        lambda m, t, x: jax_tt.tt.lookup(t, x, method=m),
        CASE.cores,
        SHAPE.split_ids(IDS[:, 0]),
    ),
    "max of a rectangle": (
        lambda m, t, x: squares(jax_tt.functional.embed_bag, t, x, combiner="max", method=m),
        DENSE,
        IDS,
    ),
    "gradient": (
        # The reference tells the host of ids out of range, which no file can hold.
        lambda m, t, x: squares(jax_tt.tt.embed_bag, t, x, bounds="zero", method=m),
        CASE.cores,
        BAGS,
    ),
    "fused dense": (
        lambda m, s, x: step(FUSED_DENSE, s, x, m),
        DENSE_STATE,
        BAGS,
    ),
    "fused": (lambda m, s, x: step(FUSED, s, x, m), STATE, BAGS),
    "cached": (
        lambda m, t, x: jax_tt.lookup_bags(CACHED, t, x, method=m),
        CACHED.init(jax.random.key(0)),
        BAGS,
    ),
}


def symbolic(batch):
    """The same batch with sizes ``b`` (bags or ids) and ``c`` (capacity)."""
    b, c, length = jax.export.symbolic_shape("b, c, l")
    if isinstance(batch, jax_tt.Bags):
        sizes = jax_tt.Bags((c,), (b + 1,), None if batch.weights is None else (c,))
    elif isinstance(batch, jax_tt.SplitIds):
        sizes = jax_tt.SplitIds((b, SHAPE.d))
    else:
        sizes = (b,) if batch.ndim == 1 else (b, length)
    leaves = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(batch)]
    shapes = jax.tree.leaves(sizes, is_leaf=lambda x: isinstance(x, tuple))
    structs = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(batch), structs)


@needs_native
@pytest.mark.slow(but="gradient")
@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_batch_sizes(name):
    function, table, batch = SYMBOLIC[name]
    want = jax.jit(partial(function, "native"))(table, batch)
    # CUDA, for which there are no native ops here, gets the reference, which takes long to trace for trains.
    platforms = ["cpu"] if name in ("gradient", "fused") else ["cpu", "cuda"]
    native = export(partial(function, "auto"), table, symbolic(batch), platforms=platforms)
    assert "custom_call @jax_tt_" in native.mlir_module()
    programs = [native]
    if name == "gradient":
        programs.append(export(partial(function, "reference"), table, symbolic(batch)))
    for program in programs:
        got = program.call(table, batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(a, b, 1e-5, name)


def sizes(*names):
    """Shapes of int32 arrays with symbolic sizes, such as ``"b + 1"``."""
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(name, scope=scope) for name in names]
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


@pytest.mark.parametrize("method", ["reference", pytest.param("auto", marks=needs_native)])
@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_programs_of_hash_tables_take_any_number_of_keys(method, missing):
    table = jax_tt.hash_table(64, 4, missing=missing)
    start = table.init(jax.random.key(0))
    _, state = jax_tt.dynamic.insert(table, start, np.arange(6))
    lookup = jax_tt.Lookup(bounds="zero", method=method, train=False)

    @jax.jit
    def serve(state, bags):
        sums, _ = jax_tt.lookup_bags(table, state, bags, lookup)
        # The reference of both takes twice as long to trace; the bags that are compared have one key each.
        rows = sums if method == "reference" else jax_tt.lookup(table, state, bags.ids, lookup)[0]
        return rows, sums

    words, offsets = sizes("c, 2", "b + 1")
    exported = export(serve, state, jax_tt.Bags(jax_tt.SplitIds(words), offsets))
    program = jax.export.deserialize(exported.serialize())
    keys = np.arange(9) * 3
    bags = jax_tt.Bags.from_lengths(jax_tt.dynamic.split_keys(keys), np.ones(9, np.int32))
    rows, sums = serve(state, bags)
    assert np.any(rows, axis=1).tolist() == [k < 2 or missing != "zeros" for k in range(9)]
    jax.tree.map(np.testing.assert_array_equal, program.call(state, bags), (rows, sums))
    fewer = jax_tt.Bags.from_lengths(jax_tt.dynamic.split_keys(keys[:5]), [3, 0, 2])
    parts = np.split(np.asarray(rows)[:5], [3, 3])
    assert_close(program.call(state, fewer)[1], [part.sum(axis=0) for part in parts], 1e-6)


@pytest.mark.parametrize("method", ["reference", pytest.param("auto", marks=needs_native)])
def test_programs_of_keyed_bags_take_any_number_of_bags(method):
    """Of features that have the same number of bags."""
    tables = {"t": jax_tt.dense_table(20, 4), "u": jax_tt.tt_table(64, 4, tt_ranks=2)}
    features = {"a": jax_tt.Feature("t"), "b": jax_tt.Feature("t", combiner="mean")}
    features["c"] = jax_tt.Feature("u")
    collection = jax_tt.Collection(tables, features)
    state = collection.init(jax.random.key(0))
    lookup = jax_tt.Lookup(method=method, bounds="zero", train=False)

    @jax.jit
    def serve(state, batch):
        return jax_tt.lookup_features(collection, state, batch, lookup, layout="concatenated")[0]

    ids, offsets = sizes("c", "3*b + 1")
    exported = export(serve, state, jax_tt.KeyedBags(ids, offsets, keys=tuple(features)))
    program = jax.export.deserialize(exported.serialize())
    rows = {"a": [[], [1], [2, 3]], "b": [[4], [5, 6], [7, 8, 9]], "c": [[10, 11], [12], []]}
    want = None
    for count in (3, 1):
        parts = {name: jax_tt.Bags.from_ragged(bags[:count]) for name, bags in rows.items()}
        batch = jax_tt.KeyedBags.from_bags(parts)
        want = serve(state, batch) if want is None else want[:count]
        got = program.call(state, batch)
        assert got.shape == (count, 12)
        assert_close(got, want, 1e-6)


@needs_native
def test_plans_of_symbolic_batches_are_large_enough():
    module = ffi.load("cpu")
    assert module is not None
    for name, shape in SHAPES.items():
        factors = shape.row_factors, shape.col_factors, shape.full_ranks, shape.num_rows
        stride = module.plan_size(*factors, tt._STRIDE, 1)[0]
        for n in [*range(130), 1000, 4095, 10**6 + 1, 2**31 - 1]:
            for hint in (1, 100, n):
                needed = module.plan_size(*factors, n, hint)
                assert (n // tt._STRIDE + 1) * stride >= needed[0], name


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="needs the emulated module")
def test_symbolic_batches_have_no_cuda_kernels():
    lookup = partial(jax_tt.tt.lookup, method="cuda_emulated")
    with pytest.raises(ValueError, match=r"symbolic batch size.*method='reference'"):
        export(lookup, CASE.cores, symbolic(IDS[:, 0]))


@pytest.mark.skipif(native_available("cuda"), reason="this process has CUDA ops")
@needs_native
def test_ffi_is_not_exported_for_a_platform_without_ops():
    lookup = partial(jax_tt.tt.lookup, method="native")
    with pytest.raises(NotImplementedError, match="cuda"):
        export(lookup, CASE.cores, IDS, platforms=["cpu", "cuda"])

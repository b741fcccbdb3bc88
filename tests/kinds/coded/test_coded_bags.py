"""Pooled rows of coded tables on the CPU, from packed codes, against the definition of their rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, Lookup, optimizers
from jax_tt._ids import places

# features, num_codes, bits, kind, terms, hot, hot_terms
SHAPES = {
    "bytes": (64, 16, 8, "product"),
    "wide parts": (160, 2, 4, "product"),
    "odd parts": (39, 3, 5, "product"),
    "sum of bytes": (64, 5, 8, "additive"),
    "odd sum": (7, 9, 7, "additive"),
    "long sum": (4, 3, 16, "additive"),
    "one": (1, 1, 1, "additive"),
    "parts that are sums": (18, 6, 5, "product", 2),
    "more codes of some": (18, 6, 5, "product", 2, 310, 3),
}
# More than one block of places.
N = 700


def table_of(shape, **options):
    features, num_codes, bits, kind, *more = SHAPES[shape]
    options |= dict(zip(("terms", "hot", "hot_terms"), more, strict=False))
    table = jax_tt.coded_table(N, features, num_codes, bits, kind=kind, **options)
    state = jax.jit(table.init)(jax.random.key(3))
    if table.hot:
        hot = np.random.default_rng(1).permutation(N) < table.hot
        state["hot_places"] = places.mark_members(jnp.asarray(hot))
    return table, state


def ragged(lengths, weighted, seed=0):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, N, n).tolist() for n in lengths]
    return Bags.from_ragged(
        ids, [rng.normal(size=n).tolist() for n in lengths] if weighted else None
    )


def check(table, state, bags, lookup):
    """Native sums of a CSR batch are those in float64."""

    @jax.jit
    def run(state, bags):
        return jax_tt.lookup_bags(table, state, bags, lookup)[0], table.codes(state)

    got, codes = run(state, bags)
    codes, books = np.asarray(codes), np.asarray(state["codebooks"], np.float64)
    m, terms = table.all_codes, table.part_terms
    books = books.reshape(m, 1 << table.bits, -1)
    # Codes that only hot ids have are -1 for others.
    found = [books[k, codes[:, k]] * (codes[:, k] >= 0)[:, None] for k in range(m)]
    parts = [np.sum(found[k : k + terms], axis=0) for k in range(0, m, terms)]
    rows = np.concatenate(parts, axis=1)
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    weights = np.ones(len(ids)) if bags.weights is None else np.asarray(bags.weights, np.float64)
    weighted = weights[:, None] * rows[ids]
    wanted = np.stack([weighted[a:b].sum(0) for a, b in itertools.pairwise(offsets)])
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape, weighted):
    table, state = table_of(shape)
    # One bag is longer than the native op collects at a time, and one repeats an id.
    bags = ragged([3, 0, 600, 1, 40], weighted)
    bags.ids[-40:] = N - 1
    check(table, state, bags, Lookup(method="native"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", ["odd parts", "sum of bytes"])
def test_other_types(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        table, state = table_of(shape, param_dtype=dtype)
        bags = ragged([4, 9, 0], True)
        lookup = Lookup(method="native", dtype="float64" if dtype == "float64" else "float32")
        check(table, state, bags, lookup)


@pytest.mark.parametrize("shape", ["bytes", "more codes of some"])
def test_the_program_has_one_call_and_no_codes_unpacked(shape):
    table, state = table_of(shape)
    run = jax.jit(lambda state, ids: jax_tt.lookup_bags(table, state, ids)[0])
    text = run.lower(state, jnp.zeros((8, 5), jnp.int32)).compile().as_text() or ""
    assert text.count("jax_tt_coded_forward_v1") == 1
    assert "jax_tt_dense_forward" not in text and " gather(" not in text


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_tables_of_a_collection_are_one_call(layout, one_by_one):
    """With the bits of a call for each, also of the steps and of tables behind an order of ids."""
    tables, states = {}, {}
    for name, shape in (("a", "bytes"), ("b", "odd sum"), ("c", "more codes of some")):
        table, state = table_of(shape)
        if name == "a":
            table = jax_tt.extension.with_update(table, jax_tt.Update(optimizers.Adagrad(0.1)))
        tables[name] = table
        states[name] = {**jax.jit(table.init)(jax.random.key(1)), **state}
    order = jax_tt.order.IdOrder(np.random.default_rng(2).permutation(N))
    tables["b"] = jax_tt.tables.OrderedTable(tables["b"], order)
    states["b"] |= jax.jit(tables["b"].init)(jax.random.key(1))
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    state = collection.joined(states)
    batch = {name: ragged([3, 0, 40, 1], name == "c", seed=k) for k, name in enumerate(tables)}

    def step():
        @jax.jit
        def grad(trained):
            def loss(trained):
                arrays = collection.replaced(state, trained)
                rows, _ = jax_tt.lookup_features(collection, arrays, batch, layout=layout)
                return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(rows)), rows

            return jax.grad(loss, has_aux=True)(trained)

        lowered = grad.lower(collection.trained(state))
        return lowered.as_text().count("jax_tt_coded_forward_v1"), lowered.compile()(
            collection.trained(state)
        )

    calls, got = step()
    one_by_one()
    alone, want = step()
    assert (calls, alone) == (1, 3)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("shape", ["odd sum", "more codes of some"])
def test_ids_out_of_range(shape):
    table, state = table_of(shape, name="words")
    ids = jnp.array([[1, N, 2], [-1, 3, 3], [-2, 5, 2**31 - 1]])

    @functools.partial(jax.jit, static_argnums=0)
    def pooled(bounds, ids):
        return jax_tt.lookup_bags(table, state, ids, bounds=bounds)[0]

    inside = pooled("zero", jnp.array([[1, 2, -1], [3, 3, -1], [5, -1, -1]]))
    np.testing.assert_array_equal(pooled("zero", ids), inside)
    clipped = pooled("clip", jnp.array([[1, N - 1, 2], [-1, 3, 3], [0, 5, N - 1]]))
    np.testing.assert_array_equal(pooled("clip", ids), clipped)
    # The error names the table of ids, not that of codebook rows.
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"'words'.*{N}"):
        jax.block_until_ready(pooled("error", ids))
    with jax.enable_x64(True):
        far = jnp.array([[2**40, 1]], jnp.int64)
        np.testing.assert_array_equal(pooled("zero", far), pooled("zero", jnp.array([[1]])))


def test_empty_batches():
    table, state = table_of("bytes")
    for ids in (jnp.zeros((0, 4), jnp.int32), jnp.zeros((4, 0), jnp.int32)):
        found, _ = jax_tt.lookup_bags(table, state, ids, method="native")
        np.testing.assert_array_equal(found, np.zeros((len(ids), 64)))


def test_mapped_over_batches_and_tables():
    table, state = table_of("more codes of some")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, N, (3, 4, 5)))
    states = jax.tree.map(lambda array: jnp.stack([array, array]), state)

    def pooled(state, ids):
        return jax_tt.lookup_bags(table, state, ids)[0]

    @jax.jit
    def run(state, states, ids):
        of_batches = jax.vmap(pooled, (None, 0))(state, ids)
        return of_batches, jax.vmap(pooled, (0, None))(states, ids[0])

    of_batches, of_tables = run(state, states, ids)
    one = jax.jit(pooled)
    each = np.stack([one(state, own) for own in ids])
    np.testing.assert_array_equal(of_batches, each)
    np.testing.assert_array_equal(of_tables, np.stack([each[0]] * 2))


@pytest.mark.parametrize("shape", ["odd sum", "more codes of some"])
def test_trained_in_the_backward_pass(shape):
    table, state = table_of(shape, optimizer=jax_tt.optimizers.Adagrad(0.1))
    bags = ragged([4, 0, 7, 1], True)

    def step(method):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, bags, method=method)
            return jnp.sum(jnp.sin(rows))

        return jax.jit(jax.grad(loss))({name: state[name] for name in table.spec.trained_names})

    found = step("native")
    for name, array in step("reference").items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)

"""A batch with ids out of range costs a model with bounds="warn" nothing: it trains on as if they were not there,
counts them and says so once."""

import functools
import re
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt
from jax_tt._base import reports
from jax_tt._ids.split_ids import SplitIds
from tests.conftest import method_fixture, native_available
from tests.helpers import TRAINED
from tests.kinds.cached import cache_parts

N, D, B, L = 50, 4, 6, 3
FACTORS = {"row_factors": (4, 14), "col_factors": (2, 2), "tt_ranks": 3}
RULE = jax_tt.optimizers.Adagrad(0.1)
ORDER = jax_tt.order.from_counts(np.arange(N))
KINDS = {
    "dense": {},
    "dense fused": {"optimizer": RULE},
    "tt": {},
    "tt fused": {"optimizer": RULE},
    "cached": {"cache": jax_tt.RowCache(8, ways=2, refresh_every=2)},
    "cached fused": {"cache": jax_tt.RowCache(8, ways=2, refresh_every=2), "optimizer": RULE},
    "ordered": {"id_order": ORDER},
}
BAD = (N, -1, 2**31 - 1, -(2**31))
native = pytest.mark.skipif(not native_available(), reason="no native module")
method = method_fixture("reference", "native", "cuda_emulated")


@pytest.fixture(autouse=True)
def _new_reports():
    """Every test may report every table."""
    reports.forget()


def layer_options(kind, method):
    dense = kind.startswith("dense")
    cls = jax_tt.EmbedBag if dense else jax_tt.TTEmbedBag
    return cls, {"method": method, **({} if dense else FACTORS), **KINDS[kind]}


class Model(nnx.Module):
    def __init__(self, kind, method, combiner="sum"):
        cls, options = layer_options(kind, method)
        rngs = nnx.Rngs(0)
        self.items = cls(N, D, combiner=combiner, name="items", rngs=rngs, **options)
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, bags):
        return self.head(self.items(bags))


@nnx.jit(donate_argnums=(0, 1))
def take_step(model, opt, bags, y):
    loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean((m(bags) - y) ** 2))(model)
    opt.update(model, grads)
    return loss


def batches():
    """Bags of good ids, the same with ids out of range beside them, and how many of those there are."""
    rng = np.random.default_rng(0)
    good, bad, count = [], [], 0
    for step in range(4):
        lists = [rng.integers(0, N, rng.integers(0, L + 1)).tolist() for _ in range(B)]
        mixed = [list(ids) for ids in lists]
        if step % 2:
            for value in BAD:
                ids = mixed[rng.integers(B)]
                ids.insert(int(rng.integers(len(ids) + 1)), value)
            count += len(BAD)
        capacity = B * L + len(BAD)
        good.append(jax_tt.Bags.from_ragged(lists, capacity=capacity))
        bad.append(jax_tt.Bags.from_ragged(mixed, capacity=capacity))
    return good, bad, count


def train(kind, method, given):
    model = Model(kind, method)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.05, momentum=0.9))
    for k, bags in enumerate(given):
        take_step(model, opt, bags, jnp.full((B, 1), float(k)))
    return model


def parameters(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, TRAINED)))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("kind", ["dense fused", "tt", "tt fused", "cached fused", "ordered"])
def test_a_model_survives_bad_batches(kind, method):
    """Every parameter reads, and training goes on as if the bad ids had not been there, bit for bit."""
    good, bad, count = batches()
    trained = train(kind, method, bad)
    same(parameters(trained), parameters(train(kind, method, good)))
    assert int(trained.items.out_of_range[...]) == count


def test_a_linen_model_survives_bad_batches():
    class Tower(nn.Module):
        @nn.compact
        def __call__(self, bags):
            table = jax_tt.tt_table(N, D, optimizer=RULE, **FACTORS)
            return nn.Dense(1)(jax_tt.linen.TableEmbed(table, combiner="sum")(bags))

    model = Tower()
    good, bad, count = batches()
    variables = model.init(jax.random.key(0), good[0])
    assert "out_of_range" not in variables

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, counts, bags, y):
        def loss(variables):
            out, new = model.apply({**variables, **counts}, bags, mutable=["out_of_range"])
            return jnp.mean((out - y) ** 2), new

        grads, counts = jax_tt.linen.grad(loss, has_aux=True)(state.variables)
        return state.apply_gradients(grads=grads), counts

    def trained(given):
        # Copies, because the state is donated.
        own = jax.tree.map(jnp.array, variables)
        state = jax_tt.linen.TrainState.create(
            apply_fn=model.apply, variables=own, tx=optax.sgd(0.05, momentum=0.9)
        )
        counts = {}
        for k, bags in enumerate(given):
            state, counts = step(state, counts, bags, jnp.full((B, 1), float(k)))
        (number,) = jax.tree.leaves(counts)
        return jax.tree.map(np.asarray, state.variables), int(number)

    (want, none), (got, found) = trained(good), trained(bad)
    same(got, want)
    assert (none, found) == (0, count)


@pytest.mark.parametrize(
    ("bounds", "combiner"), [("warn", "sum"), ("warn", "mean"), ("zero", "sqrtn")]
)
def test_warn_is_zero_in_values_and_gradients(bounds, combiner, method):
    """An id out of range counts in the divisor, as any id of the bag does."""
    cores = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape(N, D, 3, (4, 14), (2, 2)))
    weights = jnp.array([[0.5, 2.0, 1.0], [1.0, 3.0, 0.25]])
    ids = jnp.array([[3, N, 7], [-5, 3, 3]])

    def pooled(cores, weights, ids, bounds):
        bags = jax_tt.Bags(ids, weights=weights)
        options = {"combiner": combiner, "num_embeddings": N, "bounds": bounds, "method": method}
        return jnp.sum(jax_tt.tt.embed_bag(cores, bags, **options) ** 2)

    grad = jax.jit(jax.value_and_grad(pooled, (0, 1)), static_argnums=3)
    value, (dcores, dweights) = grad(cores, weights, ids, bounds)
    # The same written with a row of zeros.
    table = jnp.concatenate([jax_tt.tt.to_dense(cores)[:N], jnp.zeros((1, D))])
    there = jnp.where((ids >= 0) & (ids < N), ids, N)

    def plain(weights):
        sums = jnp.einsum("bl,bld->bd", weights, table[there])
        sizes = {"sum": jnp.ones(2), "mean": weights.sum(1), "sqrtn": jnp.sqrt((weights**2).sum(1))}
        return jnp.sum((sums / sizes[combiner][:, None]) ** 2)

    want, want_weights = jax.jit(jax.value_and_grad(plain))(weights)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(dweights, want_weights, rtol=1e-4, atol=1e-6)
    _, (without, _) = grad(cores, jnp.where(there < N, weights, 0), there % N, "clip")
    if combiner == "sum":
        for a, b in zip(dcores, without, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# What is said: with a count by the reference and the native ops of the CPU; CUDA kernels leave a notice.
speaking = pytest.mark.parametrize("method", ["reference", pytest.param("native", marks=native)])


def said(call):
    """Messages of the warnings that a call leads to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(call())
        jax.effects_barrier()
        threading.Event().wait(0.001)  # the main thread comes to its errands
    return [str(w.message) for w in caught if w.category is jax_tt.OutOfRangeWarning]


@speaking
@pytest.mark.parametrize("kind", ["dense", "tt fused", "cached", "ordered"])
def test_a_report_names_table_position_value_and_count(kind, method):
    model = Model(kind, method)
    bags = jax_tt.Bags.from_ragged([[3, 4], [], [-1, 7, N + 9]])
    (message,) = said(lambda: nnx.jit(Model.__call__)(model, bags))
    assert "2 ids of a batch, the first of them id -1 at position 2, are" in message
    assert f"table 'items' of {N} rows" in message


@speaking
@pytest.mark.parametrize(("dtype", "given"), [("int32", -1), ("uint32", 2**32 - 1)])
def test_a_cached_table_reports_an_id_as_it_was_written(dtype, given, method):
    """Native lookups of misses mark hits by all bits set, and so must tell an id that has them from a hit."""
    shape = jax_tt.TTShape(N, D, 3, FACTORS["row_factors"], FACTORS["col_factors"])
    cache = jax_tt.RowCache(8, ways=2)
    ids = jnp.asarray(np.array([3, given], dtype))
    options = {"num_embeddings": N, "bounds": "warn", "method": method}

    @jax.jit
    def call():
        table = cache_parts.init_parts(jax_tt.tt.init(jax.random.key(0), shape), cache)
        return cache_parts.lookup(table, ids, cache, **options)[0]

    (message,) = said(call)
    assert message.startswith(f"id {given} at position 1 is")


@speaking
def test_under_vmap_a_report_is_of_the_first_example_that_has_such_ids(method):
    shape = jax_tt.TTShape(N, D, 3, FACTORS["row_factors"], FACTORS["col_factors"])
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    ids = jnp.array([[1, 2, 3], [4, -1, N], [N, N, N]])

    def call(ids):
        return jax_tt.tt.lookup(cores, ids, num_embeddings=N, bounds="warn", method=method)

    given = jnp.stack([jnp.zeros_like(ids), ids])
    (message,) = said(lambda: jax.jit(jax.vmap(jax.vmap(call)))(given))
    assert "2 ids of a batch, the first of them id -1 at position 1, are" in message


@speaking
def test_a_table_is_reported_once(method):
    """Another table is reported beside it, and both counters go on."""
    models = [Model("tt", method) for _ in range(2)]
    models[1].items.name = "users"
    ids = jnp.array([[1, N]])
    call = nnx.jit(Model.__call__)
    messages = [said(lambda m=m: call(m, ids)) for m in (*models, *models)]
    assert ["items" in str(m) for m in messages] == [True, False, False, False]
    assert ["users" in str(m) for m in messages] == [False, True, False, False]
    assert all(int(m.items.out_of_range[...]) == 2 for m in models)


def test_tables_without_a_name_are_told_apart_by_their_rows():
    """Both of one program, whose reports arrive together."""
    ids = jnp.array([[1, N]])

    @jax.jit
    def call():
        tables = [jnp.ones((rows, D)) for rows in (N - 1, N)]
        return [jax_tt.functional.embed_bag(table, ids, bounds="warn") for table in tables]

    messages = said(call)
    assert [f"a table of {rows} rows" in m for rows, m in zip((N - 1, N), messages, strict=True)]


def test_a_warning_shows_the_line_that_led_to_it():
    with pytest.warns(jax_tt.OutOfRangeWarning) as warned:
        reports.report("items", N, 1, "id -1", 0)
    assert warned[0].filename == __file__


def test_a_report_in_the_middle_of_another():
    """The main thread is led to one between any two of its instructions."""

    class Interrupted(str):
        def __hash__(self):
            reports.report("inner", N, 1, "id -1", 0)
            return super().__hash__()

    def outer():
        reports.report(Interrupted("outer"), N, 1, "id -1", 0)

    thread = threading.Thread(target=outer, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_tt.OutOfRangeWarning)
        thread.start()
        thread.join(10)
    assert not thread.is_alive()
    assert {table for table, _ in reports._reported} == {"inner", "outer"}


def test_a_warning_turned_into_an_error_stops_nothing(monkeypatch):
    caught = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(args.exc_type))
    model = Model("tt fused", "auto")
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(model, opt, jnp.array([[1, N]] * B), jnp.zeros((B, 1))).block_until_ready()
        jax.effects_barrier()
        threading.Event().wait(0.001)
    assert caught == [jax_tt.OutOfRangeWarning]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(parameters(model)))


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="no emulated kernels")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dense", "int32"),
        ("tt", "uint32"),
        ("tt", "int64"),
        ("cached", "int32"),
        ("split", "beyond"),
    ],
)
def test_cuda_kernels_leave_notices(kind, dtype, request):
    """A thread takes them to the main thread, once for every table of the process."""
    if dtype == "int64":
        request.getfixturevalue("x64")
    name, options = f"notice {kind} {dtype}", {"bounds": "warn", "method": "cuda_emulated"}
    bad = N + 7 if dtype == "uint32" else -1
    ids, words = [[1, 2, bad], [N + 9, 3, bad]], rf"id ({bad}|{N + 9}) at position [235] is"
    if kind == "split":
        shape = jax_tt.TTShape(10**12, 4, 1, (10**4, 10**4, 10**4), (1, 2, 2))
        cores = jax_tt.tt.init(jax.random.key(0), shape)
        words = "an id beyond 1000000000000 at position 1 is"
        ids = shape.split_ids(np.array([[5, 10**12 + 5]]))
        call = lambda: jax_tt.tt.embed_bag(cores, jax_tt.Bags(ids), name=name, **options)  # noqa: E731
    else:
        cls, own = layer_options(kind, "cuda_emulated")
        layer = cls(N, D, name=name, rngs=nnx.Rngs(0), **own)
        call = lambda: layer(jnp.array(ids, dtype))  # noqa: E731

    def waited():
        jax.block_until_ready(call())
        for _ in range(200):
            threading.Event().wait(0.01)
            if any(table == name for table, _ in reports._reported):
                return

    (message,) = said(waited)
    assert re.search(words, message)
    assert f"table '{name}'" in message
    assert said(call) == []


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="no emulated kernels")
def test_a_notice_that_python_ends_before_is_reported():
    """The last step of a script, with nothing behind it."""
    code = (
        "import jax, jax.numpy as jnp, jax_tt\n"
        "options = {'bounds': 'warn', 'method': 'cuda_emulated'}\n"
        "call = lambda: jax_tt.functional.embed_bag(jnp.ones((9, 4)), jnp.array([[9]]), **options)\n"
        "jax.block_until_ready(jax.jit(call)())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "id 9 at position 0 is out of range for a table of 9 rows" in done.stderr


@native
def test_reports_of_other_threads():
    """Training threads post while the main thread waits for them."""
    ids = jnp.array([[1, N]])

    def run(k):
        table = jnp.ones((N, D))
        jax_tt.functional.embed_bag(table, ids, bounds="warn", name=f"table {k}", method="native")

    def start():
        threads = [threading.Thread(target=run, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    messages = said(start)
    assert sorted(m.partition("'")[2].partition("'")[0] for m in messages) == [
        f"table {k}" for k in range(8)
    ]


@speaking
def test_split_ids_are_named_as_ids(method):
    shape = jax_tt.TTShape(10**12, 4, 1, (10**4, 10**4, 10**4), (1, 2, 2))
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    options = {"num_embeddings": 10**12, "method": method}
    lookup = jax.jit(lambda ids: jax_tt.tt.lookup(cores, ids, bounds="warn", **options))
    strict = jax.jit(lambda ids: jax_tt.tt.lookup(cores, ids, bounds="error", **options))
    for ids, words in (
        ([5, 10**12 + 7], f"id {10**12 + 7} at position 1"),
        ([-3, 5], "a negative id at position 0"),
        ([5, 2**62], "an id beyond 1000000000000 at position 1"),
    ):
        reports.forget()
        split = shape.split_ids(np.array(ids, np.int64))
        (message,) = said(lambda s=split: lookup(s))
        assert words in message
        if method == "native":
            with pytest.raises(jax.errors.JaxRuntimeError, match=words):
                jax.block_until_ready(strict(split))
    # Digits of a caller's own, in range for the cores but not for the table.
    digits = SplitIds(jnp.array([[9999, 9999, 9999]], jnp.int32))
    reports.forget()
    options["num_embeddings"] = 10**12 - 1
    (message,) = said(lambda: lookup(digits))
    assert f"id {10**12 - 1} at position 0" in message


# The counter.


def test_evaluation_counts_nothing():
    model = Model("tt", "auto")
    ids = jnp.array([[1, N]])
    model(ids)
    model.eval()
    model(ids)
    assert int(model.items.out_of_range[...]) == 1
    model.train()
    model(ids)
    assert int(model.items.out_of_range[...]) == 2


def test_the_counter_stops_at_the_largest_int():
    layer = jax_tt.EmbedBag(N, D, rngs=nnx.Rngs(0))
    layer.out_of_range[...] = jnp.int32(2**31 - 2)
    for _ in range(2):
        layer(jnp.array([[N, N]]))
        assert int(layer.out_of_range[...]) == 2**31 - 1


def test_transformations():
    """Where the variable cannot be changed the call works and does not count; one model under vmap counts all."""
    model = Model("tt", "auto")
    ids = jnp.array([[1, N], [-1, -1], [3, 4]])
    total = model.items.out_of_range
    plain = model(ids)
    assert int(total[...]) == 3
    np.testing.assert_array_equal(jax.jit(lambda i: model(i))(ids), plain)
    jax.vmap(lambda i: model(i[None]))(ids)
    assert int(total[...]) == 3
    mapped = nnx.vmap(lambda m, i: m(i), in_axes=(None, 0))(model, jnp.stack([ids, ids]))
    np.testing.assert_allclose(mapped[1], plain, rtol=1e-6)
    assert int(total[...]) == 9
    nnx.vmap(nnx.vmap(lambda m, i: m(i), in_axes=(None, 0)), in_axes=(None, 0))(
        model, ids.reshape(3, 1, 1, 2)
    )
    assert int(total[...]) == 12
    jax_tt.grad(lambda m: nnx.remat(Model.__call__)(m, ids).sum())(model)
    assert int(total[...]) == 15


def test_each_model_of_an_ensemble_counts_its_own():
    @nnx.vmap
    def make(seed):
        return jax_tt.EmbedBag(N, D, rngs=nnx.Rngs(seed))

    layers = make(jax.random.split(jax.random.key(0), 3))
    ids = jnp.array([[[1, N]], [[2, 3]], [[-1, -2]]])
    nnx.vmap(lambda layer, i: layer(i))(layers, ids)
    assert layers.out_of_range[...].tolist() == [1, 0, 2]
    nnx.vmap(lambda layer, i: layer(i), in_axes=(0, None))(layers, ids[0])
    assert layers.out_of_range[...].tolist() == [2, 1, 3]


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_shards_count(check_vma):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=kinds, devices=jax.devices()[:2])
    P = jax.sharding.PartitionSpec
    axis = None if check_vma else "data"
    layer = jax_tt.TTEmbedBag(N, D, axis_name=axis, method="reference", rngs=nnx.Rngs(0), **FACTORS)
    call = nnx.shard_map(
        lambda layer, ids: layer(ids),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    nnx.jit(call)(layer, jnp.array([[N, N], [1, -1]]))
    assert int(layer.out_of_range[...]) == 3


@native
def test_error_is_still_an_error():
    layer = jax_tt.EmbedBag(N, D, bounds="error", method="native", rngs=nnx.Rngs(0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"bounds=\"warn\""):
        layer(jnp.array([[N]])).block_until_ready()


@native
@pytest.mark.parametrize("kind", ["dense", "train", "coded", "quantized"])
def test_an_error_names_the_function_and_the_table(kind):
    make = {
        "dense": lambda: jax_tt.dense_table(N, D, name="t"),
        "train": lambda: jax_tt.tt_table(N, D, tt_ranks=2, name="t"),
        "coded": lambda: jax_tt.coded_table(N, D, num_codes=2, bits=2, name="t"),
    }
    if kind == "quantized":
        table, state = jax_tt.quantize(np.ones((N, D), np.float32), 8)
        table = jax_tt.extension.with_name(table, "t")
    else:
        table = make[kind]()
        state = table.init(jax.random.key(0))
    collection = jax_tt.Collection({"t": table}, {"f": jax_tt.Feature("t")})
    found = rf": id {N} at position 1 is out of range for table 't( \(features f\))?' of {N} rows"
    for call, operands in (
        (jax_tt.lookup, (table, state, jnp.array([1, N]))),
        (jax_tt.lookup_bags, (table, state, jnp.array([[1, N]]))),
        (jax_tt.lookup_features, (collection, {"t": state}, {"f": jnp.array([[1, N]])})),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{call.__name__}{found}"):
            jax.block_until_ready(call(*operands, method="native", bounds="error"))


def test_native_programs_call_no_host():
    """A call of the host would cost jit its fast dispatch and the compilation cache."""
    layer = jax_tt.TTEmbedBag(N, D, rngs=nnx.Rngs(0), **FACTORS)
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
    assert (
        "callback" in step.lower(state, jnp.array([[1, N]])).as_text()
    ) is not native_available()

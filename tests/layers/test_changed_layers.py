"""Layers that are reordered or grow between steps: rows, optimizer state, caches, checkpoints, both flavours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt.order import IdOrder

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

N, D = 58, 8
FACTORS = {"row_factors": (3, 4, 5), "col_factors": (2, 2, 2)}
OLD, NEW = (IdOrder(np.random.default_rng(seed).permutation(N)) for seed in range(2))
IDS = np.array([3, 57, 3, 0, 17, 42], np.int32)
ALL = np.arange(N)
ADAM = jax_tt.optimizers.Adam(0.01)
CACHE = jax_tt.RowCache(8, ways=4, refresh_every=1, write_back=None)
CASES = {
    "plain": {},
    "bfloat16": {"param_dtype": jnp.bfloat16, "optimizer": ADAM},
    "fused": {"optimizer": ADAM, "id_order": OLD},
    "rowwise-cache": {"optimizer": jax_tt.optimizers.RowWiseAdagrad(0.05), "cache": CACHE},
    "optax-cache": {"cache": CACHE, "id_order": OLD},
}
# With a rule, with a cache and a rule, and with a cache and state of optax.
cases = pytest.mark.parametrize("case", ["bfloat16", "rowwise-cache", "optax-cache"])


class Tower(nnx.Module):
    """Two tables, of which one changes, and a layer that optax steps."""

    def __init__(self, **options):
        options = {"tt_ranks": 12, **FACTORS, **options}
        self.items = jax_tt.TTEmbed(N, D, rngs=nnx.Rngs(0), **options)
        self.users = jax_tt.TTEmbed(N, D, rngs=nnx.Rngs(1), **FACTORS, tt_ranks=2)
        self.head = nnx.Linear(D, 1, rngs=nnx.Rngs(2))

    def __call__(self, ids):
        rows = self.items(ids).astype(jnp.float32) * self.users(ids % N)
        return self.head(rows)


@nnx.jit(donate_argnums=(0, 1))
def step(model, opt, ids):
    loss, grads = jax_tt.value_and_grad(lambda model: jnp.mean((model(ids) - 1) ** 2))(model)
    opt.update(model, grads)
    jax_tt.refresh_caches(model)
    return loss


@nnx.jit
def rows_of(layer, ids):
    return layer(ids)


def trained(case, steps=4):
    model = Tower(**CASES[case])
    opt = jax_tt.FusedOptimizer(model, optax.adam(0.01))
    for _ in range(steps):
        step(model, opt, IDS)
    model.eval()
    return model, opt


def values(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree)))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def near(a, b, dtype=jnp.float32):
    np.testing.assert_allclose(
        np.asarray(a, np.float32),
        np.asarray(b, np.float32),
        atol=0.02 if dtype == jnp.bfloat16 else 1e-5,
    )


@pytest.mark.slow(but="rowwise")
@cases
def test_reordered_layers_go_on(case):
    """With the largest ranks no id notices, cached rows included; training then falls as it did."""
    model, opt = trained(case)
    layer = model.items
    before, others = rows_of(layer, ALL), values((model.users, model.head))
    found = layer.reorder(NEW, opt=opt, model=model)
    assert found.relative_error < (2e-2 if case == "bfloat16" else 1e-5)
    near(rows_of(layer, ALL), before, layer.param_dtype)
    equal(layer.id_order[...], NEW.rows)
    equal(values((model.users, model.head)), others)
    if layer.cache is not None:
        assert layer.cache_statistics()["occupied"] == 0
    model.train()
    losses = [float(step(model, opt, IDS)) for _ in range(12)]
    assert losses[-1] < 0.98 * losses[0]
    assert not any(np.isnan(losses))


def test_cached_rows_are_not_lost():
    """What only the cache knows is in the cores afterwards."""
    model, _ = trained("optax-cache")
    layer = model.items
    slot = int(np.argmax(layer.cache_tags[...].reshape(-1) >= 0))
    layer.cache_rows[...] = layer.cache_rows[...].at[slot].set(5.0)
    (row,) = np.flatnonzero(OLD.rows == layer.cache_tags[...].reshape(-1)[slot])
    near(rows_of(layer, row), 5.0)
    layer.reorder(NEW)
    near(rows_of(layer, row), 5.0)


def test_fused_slots_restart_at_their_mean():
    model, opt = trained("fused")
    layer = model.items
    before = values(layer)
    layer.reorder(NEW, opt=opt, model=model)
    after = values(layer)
    for slot in ("mu", "nu"):
        for k in range(3):
            name = f"slot_{slot}_{k}"
            assert after[name].shape == before[name].shape
            np.testing.assert_allclose(
                after[name], before[name].mean(dtype=np.float64), rtol=1e-4, atol=1e-12
            )
    assert after["step"] == 4 and after["sentinel"] == 1
    assert after["slot_nu_0"].min() > 0


def test_optax_state_restarts_for_this_table_alone():
    model, opt = trained("plain")
    before = values(opt)
    model.items.reorder(NEW, ranks=5, opt=opt, model=model)
    after = values(opt)
    assert after["opt_state"][0]["count"] == before["opt_state"][0]["count"] == 4
    for moment in ("mu", "nu"):
        old, new = before["opt_state"][0][moment], after["opt_state"][0][moment]
        for other in ("users", "head"):
            equal(old[other], new[other])
        for k in range(3):
            core = new["items"][f"core_{k}"]
            assert core.shape == model.items.cores[k].shape
            mean = old["items"][f"core_{k}"].mean(dtype=np.float64)
            np.testing.assert_allclose(core, mean, rtol=1e-4, atol=1e-12)


def test_copies_of_parameters_are_those_of_the_new_ones():
    model = Tower()
    opt = nnx.Optimizer(model, optax.contrib.schedule_free_sgd(0.1), wrt=nnx.Param)
    users = np.asarray(opt.opt_state.z["users"]["core_0"])
    model.items.reorder(NEW, ranks=5, opt=opt, model=model)
    for k, core in enumerate(model.items.cores):
        equal(opt.opt_state.z["items"][f"core_{k}"][...], core)
    equal(opt.opt_state.z["users"]["core_0"][...], users)


def test_other_shapes():
    """Another number of cores, ranks by a tolerance; a table that was built without an order."""
    model, opt = trained("bfloat16")
    layer = model.items
    before = rows_of(layer, ALL)
    layer.reorder(NEW, ranks=100, row_factors=(8, 8), col_factors=(2, 4), opt=opt, model=model)
    assert (
        layer.tt_shape.d == 2 and not hasattr(layer, "core_2") and not hasattr(layer, "slot_mu_2")
    )
    near(rows_of(layer, ALL), before, jnp.bfloat16)
    layer.reorder(OLD, tolerance=0.01, row_factors=(2, 4, 3, 3), col_factors=(2, 2, 2, 1))
    assert layer.tt_shape.d == 4 and layer.slot_nu_3.shape[0] == 3
    near(rows_of(layer, ALL), before, jnp.bfloat16)
    model.train()
    step(model, opt, IDS)
    plain, opt = trained("plain")
    with pytest.raises(
        ValueError, match="opt: got the state of a table of 3 cores, which would have 2"
    ):
        plain.items.reorder(
            NEW, ranks=4, row_factors=(8, 8), col_factors=(2, 4), opt=opt, model=plain
        )
    assert plain.items.tt_shape.d == 3 and plain.items.id_order is None


def test_variables_of_a_subclass_stay():
    class Biased(jax_tt.TTEmbed):
        def __init__(self, **options):
            super().__init__(N, D, rngs=nnx.Rngs(0), **options)
            self.bias = nnx.Param(jnp.arange(8.0))

    layer = Biased(**FACTORS, optimizer=ADAM, tt_ranks=2)
    layer.reorder(NEW, ranks=4, row_factors=(8, 8), col_factors=(2, 4))
    layer.grow(80, rngs=nnx.Rngs(1))
    equal(layer.bias[...], np.arange(8))
    assert not hasattr(layer, "core_2") and not hasattr(layer, "slot_mu_2")


@cases
@pytest.mark.parametrize("more", [2, 30])
def test_grown_layers_go_on(case, more):
    """Old ids have the rows, the slots and the places in the cache that they had; new ones can be trained."""
    model, opt = trained(case)
    layer = model.items
    before, state, moments = rows_of(layer, ALL), values(model), values(opt)
    layer.grow(N + more, opt=opt, model=model, rngs=nnx.Rngs(3))
    assert layer.num_embeddings == N + more and layer.tt_shape == layer.tt_shape.grow(N + more)
    after = values(model)
    for name, value in state["items"].items():
        now = after["items"].pop(name)
        if name.startswith("cache_ghost"):
            continue
        equal(now[: len(value)] if value.ndim else now, value)
        if name.startswith("slot"):
            assert not now[len(value) :].any()
    assert not after["items"]
    near(rows_of(layer, ALL), before, layer.param_dtype)
    now = values(opt)
    jax.tree.map(lambda a, b: equal(b[: len(a)] if a.ndim else b, a), moments, now)
    model.train()
    ids = np.array([1, 5, N, N + more - 1], np.int32)
    model.users.grow(N + more, opt=opt, model=model, rngs=nnx.Rngs(4))
    losses = [float(step(model, opt, ids)) for _ in range(12)]
    assert losses[-1] < 0.98 * losses[0]


def test_grown_order_and_like():
    model, _ = trained("fused")
    layer = model.items
    before = np.asarray(rows_of(layer, ALL))
    layer.grow(80, like=np.r_[7, 7, OLD.inverse.rows[20:40]], rngs=nnx.Rngs(3))
    equal(layer.id_order[...], OLD.grow(80).rows)
    # Ids 60 to 79 are on the appended slice; that of the rows 20 to 39 is copied.
    near(rows_of(layer, np.arange(60, 80)), before[OLD.inverse.rows[20:40]])


@pytest.mark.slow
def test_a_cache_larger_than_the_table_grows_with_it():
    layer = jax_tt.TTEmbed(
        N, D, **FACTORS, tt_ranks=12, cache=jax_tt.RowCache(100, ways=4), rngs=nnx.Rngs(0)
    )
    rows_of(layer, IDS)
    layer.populate()
    before = rows_of(layer, ALL)
    layer.grow(80, rngs=nnx.Rngs(1))
    sizes = layer.tt_shape.layer_arguments() | {"cache": jax_tt.RowCache(100, ways=4)}
    built = nnx.eval_shape(lambda: jax_tt.TTEmbed(**sizes, rngs=nnx.Rngs(0)))
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(built))) == jax.tree.map(
        jnp.shape, values(layer)
    )
    assert layer.cache_statistics()["occupied"] > 0
    near(rows_of(layer, ALL), before)


@pytest.mark.slow
def test_checkpoints_afterwards(tmp_path):
    case = "rowwise-cache"
    model, opt = trained(case, steps=2)
    model.items.reorder(NEW, ranks=6, opt=opt, model=model)
    model.items.grow(90, opt=opt, model=model, rngs=nnx.Rngs(3))
    path = (tmp_path / "state").absolute()
    arguments = CASES[case] | model.items.tt_shape.layer_arguments()
    del arguments["num_embeddings"], arguments["features"]
    other = Tower(**CASES[case])
    other.items = jax_tt.TTEmbed(
        90, D, **arguments | {"id_order": IdOrder.identity(90)}, rngs=nnx.Rngs(9)
    )
    other_opt = jax_tt.FusedOptimizer(other, optax.adam(0.01))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state((model, opt))))
        checkpointer.wait_until_finished()
        state = nnx.state((other, other_opt))
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        nnx.replace_by_pure_dict(state, checkpointer.restore(path, like))
    nnx.update((other, other_opt), state)
    equal(values((other, other_opt)), values((model, opt)))
    equal(rows_of(other.items, np.arange(90)), rows_of(model.items, np.arange(90)))


class LinenTower(nn.Module):
    table: jax_tt.Table

    @nn.compact
    def __call__(self, ids):
        return nn.Dense(1)(jax_tt.linen.TableEmbed(self.table, name="items")(ids))


@pytest.mark.parametrize("case", ["plain", "rowwise-cache"])
def test_linen(case):
    """Rows, other variables and state of optax as in NNX; the module that comes back fits the variables."""
    table = jax_tt.tt_table(N, D, tt_ranks=12, **FACTORS, **CASES[case])
    model, layer = LinenTower(table), jax_tt.linen.TableEmbed(table)
    variables = jax.jit(model.init)(jax.random.key(0), IDS)
    tx = optax.adam(0.01)
    grads = jax.tree.map(np.ones_like, variables["params"])
    _, opt_state = jax.jit(lambda grads: tx.update(grads, tx.init(grads)))(grads)

    def rows(layer, variables, ids=ALL):
        own = {name: part["items"] for name, part in variables.items() if "items" in part}
        return jax.jit(layer.apply)(own, ids)

    def reorder(table, state):
        return jax_tt.tables.reorder(table, state, NEW)

    def grow(table, state):
        return jax_tt.tables.grow(table, state, 80, key=jax.random.key(1))

    found, after = jax_tt.linen.update_table(layer, variables, reorder, path="items")
    assert found.approximation.relative_error < 1e-5
    near(rows(found.layer, after), rows(layer, variables))
    equal(after["id_order"]["items"]["id_order"], NEW.rows)
    equal(after["params"]["Dense_0"], variables["params"]["Dense_0"])
    moved = found.opt_state(tx, opt_state, after)
    equal(moved[0].mu["Dense_0"], opt_state[0].mu["Dense_0"])
    grown, larger = jax_tt.linen.update_table(found.layer, after, grow, path="items")
    near(rows(grown.layer, larger), rows(layer, variables))
    if case == "plain":
        new = grown.opt_state(tx, moved, larger)[0].mu["items"]["core_0"]
        assert new.shape == (4, 1, 2, 6) and not new[3:].any() and new[:3].all()
    out = jax.jit(LinenTower(grown.layer.table).apply)(larger, np.array([0, 79]))
    assert out.shape == (2, 1) and np.isfinite(out).all()


def test_state_of_any_transformation():
    """Steps go on after the table has grown; what has not changed its shape is the same."""
    labels = {"core_0": "b", "core_1": "a", "core_2": "b"}
    layer = jax_tt.linen.TableEmbed(jax_tt.tt_table(N, D, **FACTORS, tt_ranks=2))
    variables = jax.jit(layer.init)(jax.random.key(0), IDS)
    ones = jax.tree.map(np.ones_like, variables["params"])
    grow = functools.partial(jax_tt.tables.grow, num_embeddings=80, key=jax.random.key(1))
    grown, larger = jax_tt.linen.update_table(layer, variables, grow)
    for tx in (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.adagrad(0.1)}, labels),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    ):
        _, state = jax.jit(lambda p, tx=tx: tx.update(p, tx.init(p), p))(ones)
        after = grown.opt_state(tx, state, larger)
        shapes = jax.tree.map(jnp.shape, tx.init(larger["params"]))
        assert jax.tree.map(jnp.shape, after) == shapes
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            equal(new[: len(old)] if jnp.ndim(old) else new, old)
        jax.eval_shape(tx.update, larger["params"], after, larger["params"])


def test_no_second_state_is_allocated():
    """Moments of the tables are most of what is in memory, and a fresh state of all of them would double that."""
    adam, allocated = optax.adam(0.01), []

    def init(params):
        state = adam.init(params)
        moments = [state[0].mu, state[0].nu]
        allocated.extend(x for x in jax.tree.leaves(moments) if not isinstance(x, jax.core.Tracer))
        return state

    model = Tower()
    tx = optax.GradientTransformation(init, adam.update)
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    first = len(allocated)
    users = opt.opt_state[0].mu["users"]["core_0"][...]
    model.items.reorder(NEW, ranks=5, opt=opt, model=model)
    model.items.grow(80, rngs=nnx.Rngs(0), opt=opt, model=model)
    assert first and len(allocated) == first
    assert opt.opt_state[0].mu["users"]["core_0"][...] is users
    shapes = [core.shape for core in model.items.cores]
    assert [opt.opt_state[0].nu["items"][f"core_{k}"].shape for k in range(3)] == shapes


def test_what_layers_refuse():
    model = Tower(**CASES["optax-cache"])
    opt = jax_tt.FusedOptimizer(model, optax.adam(0.01))
    layer = model.items
    before = values(model)
    with pytest.raises(ValueError, match=r"id_order: got an order of 3 ids for a table of 58"):
        layer.reorder(IdOrder.identity(3))
    with pytest.raises(TypeError, match=r"id_order: got None; expected a jax_tt.order.IdOrder"):
        layer.reorder(None)
    with pytest.raises(
        TypeError, match="dtype: got 'bfloat16'; expected none, as a table keeps its param_dtype"
    ):
        layer.reorder(NEW, dtype="bfloat16")
    with pytest.raises(ValueError, match="model: got a module without this layer"):
        layer.reorder(NEW, opt=opt, model=model.users)
    with pytest.raises(ValueError, match="num_embeddings: got 57 for a table of 58"):
        layer.grow(57, rngs=nnx.Rngs(0))
    for count in (0, -5):
        with pytest.raises(ValueError, match=f"num_embeddings: got {count}; .* integer >= 1"):
            layer.grow(count, rngs=nnx.Rngs(0))
    for count in ("12", None):
        with pytest.raises(
            TypeError, match=f"num_embeddings: got {count!r}.*; expected an integer"
        ):
            layer.grow(count, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"like: got int64 of shape \(3,\); .*each of the 2 new ids"
    ):
        layer.grow(60, like=np.arange(3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="like: got the id 58; expected 0 to 57"):
        layer.grow(60, like=58, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="opt: got state of other parameters than model has"):
        layer.grow(80, opt=opt, model=model.items, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"layer: got a traced array; .* outside of jit"):
        nnx.jit(lambda model: model.items.grow(80, rngs=nnx.Rngs(0)))(model)
    equal(values(model), before)
    linen = jax_tt.linen.TableEmbed(jax_tt.tt_table(N, D, **FACTORS, tt_ranks=2))
    variables = linen.init(jax.random.key(0), IDS)
    update = functools.partial(jax_tt.linen.update_table, linen, variables)
    with pytest.raises(ValueError, match="variables: hold no core_0 at items in the collection"):
        update(lambda table, state: (None, state), path="items")
    with pytest.raises(TypeError, match=r"path: got \('items',\); expected names joined by '/'"):
        update(lambda table, state: (None, state), path=("items",))
    with pytest.raises(TypeError, match=r"state: got a traced array; .* outside of jit"):
        reorder = functools.partial(jax_tt.tables.reorder, id_order=NEW)
        jax.jit(lambda v: jax_tt.linen.update_table(linen, v, reorder)[1])(variables)
    core_0 = r"core_0: got \(.*\) in the state of a TTTable that fn returned; expected \("
    for fn, error, message in (
        (lambda t, s: (s, "inserted"), TypeError, "fn: returned dict, str; expected a"),
        (lambda t, s: None, TypeError, "fn: returned NoneType; expected a state, or a"),
        (lambda t, s: {"core_0": s["core_0"]}, ValueError, "core_1: got no array in"),
        (lambda t, s: (1, {**s, "core_0": s["core_1"]}), ValueError, core_0),
    ):
        with pytest.raises(error, match=message):
            update(fn)
    with pytest.raises(ValueError, match="opt_state: got state of other parameters"):
        adam = optax.adam(0.1)
        changed, after = update(lambda table, state: jax_tt.tables.reorder(table, state, NEW))
        changed.opt_state(adam, adam.init({}), after)


def test_a_layer_whose_new_cores_do_not_divide_stays():
    layer = jax_tt.TTEmbed(N, D, **FACTORS, tt_ranks=4, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ranks = jax.NamedSharding(mesh, jax.P(None, "x"))
    layer.core_1.set_value(jax.device_put(layer.core_1[...], ranks))
    before = values(layer)
    with pytest.raises(ValueError, match="divi"):
        layer.reorder(NEW, ranks=3)
    equal(values(layer), before)
    layer.reorder(NEW, ranks=6)
    assert layer.core_1[...].sharding.is_equivalent_to(ranks, 4)

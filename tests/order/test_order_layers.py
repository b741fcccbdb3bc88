"""Layers with an order of ids equal layers without one that are asked for the rows of the ids."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt._ids import stored_order
from jax_tt.order import IdOrder

N, D = 60, 4
ORDER = IdOrder(np.random.default_rng(0).permutation(N))
IDS = np.array([[3, 59, 3], [0, 17, 42]], np.int32)
PADDED = jax_tt.Bags.from_padded([[3, 59, -1], [0, -1, -1]])


def pair(kind, **options):
    """The layer with the order, and one with the same cores whose ids are rows."""

    def make(**more):
        return kind(N, D, tt_ranks=2, rngs=nnx.Rngs(0), **options, **more)

    return make(id_order=ORDER), make()


def equal(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, wanted)


@nnx.jit(donate_argnums=(0, 1))
def step(layer, opt, ids):
    grads = jax_tt.grad(lambda layer: jnp.mean((layer(ids) - 1) ** 2))(layer)
    opt.update(layer, grads)
    jax_tt.refresh_caches(layer)


def trained(layer, opt, ids, steps=3):
    """Cores after some steps, with the cached rows refreshed in between."""
    for _ in range(steps):
        step(layer, opt, ids)
    return nnx.to_pure_dict(nnx.state(layer, nnx.Not(jax_tt.nnx.IdOrderState)))


@nnx.jit
def read(layer, query, *ids):
    """Scores of all rows, and the rows of ids."""
    return layer.attend(query), *map(layer, ids)


def test_nnx_steps_and_attend():
    """Cores, slots and cached rows take the same values: keys of the cache are rows."""
    cache = jax_tt.RowCache(20, ways=4, refresh_every=1, write_back=None)
    rule = jax_tt.optimizers.Adagrad(0.1)
    ordered, plain = pair(jax_tt.TTEmbed, optimizer=rule, cache=cache)
    query = jnp.ones((2, D))
    after = [
        trained(layer, jax_tt.FusedOptimizer(layer, optax.sgd(0.1)), ids)
        for layer, ids in ((ordered, IDS), (plain, ORDER.apply(IDS)))
    ]
    equal(*after)
    everything = np.arange(N, dtype=np.int32)
    scores, some, rows = read(ordered, query, IDS, everything)
    of_plain = read(plain, query, ORDER.apply(IDS), everything)
    equal(some, of_plain[1])
    equal(scores, np.asarray(of_plain[0])[:, ORDER.rows])
    # An independent oracle: every id against its own row.
    np.testing.assert_allclose(scores, np.asarray(query) @ np.asarray(rows).T, rtol=1e-5, atol=1e-6)


def test_bags_keep_padding_and_gradients():
    ordered, plain = pair(jax_tt.TTEmbedBag, combiner="mean")
    moved = jax_tt.Bags(ORDER.apply(PADDED.ids), PADDED.offsets, PADDED.weights, PADDED.padded)

    @nnx.jit
    def both(layer, bags):
        return layer(bags), jax_tt.grad(lambda layer: jnp.sum(layer(bags) ** 2))(layer)

    (rows, gradients), (wanted, of_plain) = both(ordered, PADDED), both(plain, moved)
    equal(rows, wanted)
    equal(nnx.to_pure_dict(gradients), nnx.to_pure_dict(of_plain))


@pytest.mark.parametrize("bounds", ["error", "clip", "zero"])
def test_ids_out_of_range(bounds):
    """They are what they were: reported with the user's number, zero, or the nearest row."""
    bad = np.array([5, N, -3], np.int32)
    ordered, plain = pair(jax_tt.TTEmbed, bounds=bounds, method="reference")
    call = nnx.jit(lambda layer, ids: layer(ids))
    rows, wanted = call(ordered, bad), call(plain, ORDER.apply(bad))
    equal(rows, wanted)
    wide = np.array([5, 2**40, -(2**40)], np.int64)
    if bounds == "error":  # before anything runs
        with pytest.raises(ValueError, match="got id 1099511627776 at position 1"):
            ordered(wide)
    else:
        equal(ordered(wide), wanted)
    if bounds == "zero":
        assert not np.asarray(rows)[1:].any() and np.asarray(rows)[0].any()


def test_one_order_in_two_layers():
    """Each layer has a buffer of its own, is not trained, and survives donation."""

    class Model(nnx.Module):
        def __init__(self):
            def make():
                return jax_tt.TTEmbed(N, D, tt_ranks=2, id_order=ORDER, rngs=nnx.Rngs(0))

            self.users, self.items = make(), make()

    model = Model()
    opt = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    names = [path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert set(names) == {"core_0", "core_1", "core_2"}
    assert "id_order" not in str(nnx.state(opt))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, opt):
        def loss(model):
            return jnp.sum(model.users(IDS) * model.items(IDS))

        opt.update(model, jax_tt.grad(loss)(model))

    for _ in range(2):
        step(model, opt)
    for layer in (model.users, model.items):
        equal(layer.id_order[...], ORDER.rows)


def test_an_order_that_grows_beyond_16_bits():
    """65,536 ids are the last whose rows are uint16; a jitted step takes the packed order of one more."""
    count = 2**16
    order = IdOrder(np.random.default_rng(0).permutation(count))
    ordered, plain = (
        jax_tt.TTEmbed(count, D, tt_ranks=2, id_order=rows, rngs=nnx.Rngs(0))
        for rows in (order, None)
    )
    query = jnp.ones((2, D))
    equal(read(ordered, query)[0], np.asarray(read(plain, query)[0])[:, order.rows])
    opt = nnx.Optimizer(ordered, optax.sgd(0.1), wrt=nnx.Param)
    trained(ordered, opt, IDS, steps=1)
    assert ordered.id_order[...].dtype == jnp.uint16
    ordered.grow(count + 1, opt=opt, rngs=nnx.Rngs(1))
    trained(ordered, opt, IDS, steps=1)
    assert ordered.id_order[...].dtype == jnp.uint32
    equal(stored_order.on_host(ordered.id_order[...]), order.grow(count + 1).rows)
    plain.grow(count + 1, rngs=nnx.Rngs(1))
    for name in ("core_0", "core_1", "core_2"):
        getattr(plain, name)[...] = getattr(ordered, name)[...]
    (scores, rows), of_plain = read(ordered, query, IDS), read(plain, query, order.apply(IDS))
    equal(rows, of_plain[1])
    equal(scores[:, :count], np.asarray(of_plain[0])[:, order.rows])


def test_an_order_saved_in_32_bits_is_restored():
    ordered, _ = pair(jax_tt.TTEmbed)
    wanted, saved = ordered(IDS), nnx.to_pure_dict(nnx.state(ordered))
    saved["id_order"] = saved["id_order"].astype(jnp.int32)
    other = jax_tt.TTEmbed(N, D, tt_ranks=2, id_order=IdOrder.identity(N), rngs=nnx.Rngs(1))
    nnx.update(other, saved)
    assert other.id_order[...].dtype == jnp.int32
    equal(other(IDS), wanted)


def test_linen():
    """The order is in a collection of its own; forward, gradients and attend are those of permuted ids."""
    cache = jax_tt.RowCache(20, ways=4)
    ordered, plain = (
        jax_tt.linen.TableEmbed(jax_tt.tt_table(N, D, tt_ranks=2, cache=cache, id_order=order))
        for order in (ORDER, None)
    )
    variables = ordered.init(jax.random.key(0), IDS)
    equal(variables["id_order"]["id_order"], ORDER.rows)
    rest = {name: value for name, value in variables.items() if name != "id_order"}
    equal(rest, plain.init(jax.random.key(0), IDS))
    query = jnp.ones((2, D))
    apply = jax.jit(ordered.apply)
    np.testing.assert_allclose(
        apply(variables, IDS), plain.apply(rest, ORDER.apply(IDS)), rtol=1e-6, atol=1e-7
    )
    equal(
        ordered.apply(variables, query, method="attend"),
        plain.apply(rest, query, method="attend")[:, ORDER.rows],
    )

    def gradient(layer, fixed, ids):
        def loss(params):
            return jnp.sum(layer.apply({**fixed, "params": params}, ids) ** 2)

        return jax.grad(loss)(rest["params"])

    equal(gradient(ordered, variables, IDS), gradient(plain, rest, ORDER.apply(IDS)))
    _, counted = ordered.apply(variables, IDS, mutable=["row_cache"])
    _, wanted = plain.apply(rest, ORDER.apply(IDS), mutable=["row_cache"])
    equal(counted, wanted)
    assert hash(ordered) == hash(ordered.clone())


def test_under_vmap_and_meshes():
    ordered, plain = pair(jax_tt.TTEmbed)
    moved = plain(ORDER.apply(IDS))
    np.testing.assert_allclose(jax.vmap(ordered)(IDS), moved, rtol=1e-6, atol=1e-7)
    graph, state = nnx.split(ordered)

    def call(state, ids):
        return nnx.merge(graph, state)(ids)

    query = jnp.ones((2, D))
    for kind, check in ((AxisType.Auto, True), (AxisType.Explicit, False)):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
        ids = jax.device_put(IDS, NamedSharding(mesh, P("x")))
        placed = jax.device_put(state, NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(jax.jit(call)(placed, ids), moved, rtol=1e-6, atol=1e-7)
            scores = jax.jit(lambda s, q: nnx.merge(graph, s).attend(q))(placed, query)
        np.testing.assert_allclose(scores, ordered.attend(query), rtol=1e-6, atol=1e-7)
        mapped = jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=check
            )
        )
        np.testing.assert_allclose(mapped(placed, ids), moved, rtol=1e-6, atol=1e-7)


def test_what_layers_refuse():
    shape = pair(jax_tt.TTEmbed)[1].tt_shape
    for kind in (jax_tt.TTEmbed, jax_tt.TTEmbedBag):
        layer = kind(N, D, tt_ranks=2, id_order=ORDER, rngs=nnx.Rngs(0), name="items")
        ids = shape.split_ids(IDS)
        with pytest.raises(TypeError, match=r"items: .*got SplitIds for a table with an id_order"):
            layer(jax_tt.Bags(ids) if kind is jax_tt.TTEmbedBag else ids)
        with pytest.raises(ValueError, match=r"items: .*got dtype float32"):
            layer(jnp.ones((2, 2)))
        with pytest.raises(ValueError, match=r"id_order: got an order of 3 ids for a table of 60"):
            kind(N, D, id_order=IdOrder.identity(3), rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match=r"id_order: got a list; expected None or a"):
            kind(N, D, id_order=[0, 1], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="id_order: got an order of 3 ids"):
        jax_tt.tt_table(N, D, id_order=IdOrder.identity(3))

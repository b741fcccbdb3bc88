"""What `compress`, `quantize` and `encode` make, in layers and collections, from results and from files."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.helpers import rewrite

N, D = 101, 8
ROWS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
IDS = np.array([[0, 7, 7], [N - 1, 3, 50]], np.int32)
KINDS = ("quantized", "mixed", "product", "additive", "low_rank", "tt", "tt_sum")
FLAVOURS = pytest.mark.parametrize("layers", [jax_tt, jax_tt.linen], ids=["nnx", "linen"])


@functools.cache
def made(kind):
    """A table of the kind that `compress` names so, with its state."""
    order = jax_tt.order.from_counts(np.random.default_rng(1).permutation(N) + 1)
    train = jax_tt.tt.from_dense(
        ROWS[order.inverse.rows], 3, row_factors=(11, 10), col_factors=(2, 4)
    )
    return {
        "quantized": lambda: jax_tt.quantize(ROWS, bits=4, levels="fit", rotation="fit"),
        "mixed": lambda: jax_tt.compression.quantize_mixed(ROWS, N * D // 2 + 600),
        "product": lambda: jax_tt.encode(ROWS, 4, bits=4, hot=5, hot_terms=1, progress=False),
        "additive": lambda: jax_tt.encode(ROWS, 2, bits=4, kind="additive", progress=False),
        "low_rank": lambda: jax_tt.tt.to_table(
            jax_tt.tt.from_dense(ROWS, 3, row_factors=(N, 1), col_factors=(1, D))
        ),
        "tt": lambda: jax_tt.tt.to_table(train, order),
        "tt_sum": lambda: jax_tt.compression.residual_table(
            [jax_tt.tt.to_table(train, order), jax_tt.tt.to_table(train)]
        ),
    }[kind]()


def saved(folder, *kinds):
    path = folder / "tables.safetensors"
    jax_tt.files.save(path, {kind: made(kind) for kind in kinds})
    return path


def pooled(layer, ids=IDS):
    if isinstance(layer, nnx.Module):
        return layer(ids)
    return jax.jit(lambda key: layer.apply(layer.init(key, ids), ids))(jax.random.key(0))


@FLAVOURS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_a_layer(tmp_path, layers, kind):
    """From a table and from the file that holds it, bit for bit; and the state that was given is only read."""
    table, state = made(kind)
    want, _ = jax_tt.lookup(table, state, IDS)
    for source in (made(kind), saved(tmp_path, kind)):
        layer = layers.TableEmbed.from_pretrained(source)
        np.testing.assert_array_equal(pooled(layer), want)
    bags = jax_tt.linen.TableEmbed.from_pretrained(made(kind), combiner="mean")
    if layers is jax_tt:
        bags = jax_tt.TableEmbedBag.from_pretrained(made(kind), lookup=jax_tt.Lookup("mean"))
    np.testing.assert_allclose(pooled(bags), want.mean(1), rtol=1e-5, atol=1e-6)
    if layers is jax_tt:
        nnx.jit(lambda layer: None, donate_argnums=0)(bags)
    np.testing.assert_array_equal(jax_tt.lookup(table, state, IDS)[0], want)


def test_results_of_compress_and_dense_sources(tmp_path):
    result = jax_tt.compress(ROWS, kind="quantized", max_bytes=N * 12, progress=False)
    want, _ = jax_tt.lookup(result.table, result.state, IDS)
    np.testing.assert_array_equal(jax_tt.TableEmbed.from_pretrained(result)(IDS), want)
    np.save(tmp_path / "rows.npy", ROWS)
    for source in (ROWS, tmp_path / "rows.npy"):
        layer = jax_tt.TableEmbed.from_pretrained(source)
        np.testing.assert_array_equal(layer(IDS), ROWS[IDS])
    train = jax_tt.tt.from_dense(ROWS, 4)
    exact = jax_tt.TTEmbed.from_pretrained(train)(IDS)
    for source in (train, train.cores):
        np.testing.assert_array_equal(jax_tt.TableEmbed.from_pretrained(source)(IDS), exact)
    low = jax_tt.compress(ROWS, kind="low_rank", max_bytes=N * 12, progress=False)
    assert jax_tt.TTEmbed.from_pretrained(low)(IDS).shape == (2, 3, D)


@pytest.mark.parametrize("kind", ["additive", "tt_sum"])
def test_a_given_table_that_is_trained(kind):
    update = jax_tt.Update(jax_tt.optimizers.Adagrad(0.1))
    layer = jax_tt.TableEmbed.from_pretrained(made(kind), update=update)
    want, _ = jax_tt.lookup(*made(kind), IDS)
    np.testing.assert_array_equal(layer(IDS), want)
    grads = jax_tt.grad(lambda layer: layer(IDS).sum())(layer)
    jax_tt.FusedOptimizer(layer, optax.sgd(0.1)).update(layer, grads)
    assert layer(IDS).sum() < want.sum()


def collection(optimizer=None):
    tables = {
        "item": jax_tt.dense_table(N, D, optimizer=optimizer),
        "user": jax_tt.dense_table(20, D),
    }
    return tables, {name: jax_tt.Feature(name) for name in tables}


BATCH = {"item": IDS, "user": np.array([[3], [4]], np.int32)}


def test_tables_of_a_collection_are_replaced(tmp_path):
    """For serving: in both flavours, and as functions; the collection that was trained stays as it is."""
    optimizer = jax_tt.optimizers.Adagrad(0.1)
    embed = jax_tt.EmbedCollection(*collection(optimizer), rngs=nnx.Rngs(0))
    before = embed(BATCH)
    path = saved(tmp_path, "tt", "quantized")
    with pytest.raises(jax_tt.FileError, match="table: got 'item'; expected one of quantized, tt"):
        embed.replaced({"item": path})
    (tmp_path / "one").mkdir()
    embed.tables["item"].deterministic = True
    for source in (made("quantized"), saved(tmp_path / "one", "quantized")):
        served = embed.replaced({"item": source})
        assert served.tables["item"].deterministic and not served.tables["user"].deterministic
        rows = served(BATCH)
        np.testing.assert_array_equal(rows["item"], jax_tt.lookup_bags(*made("quantized"), IDS)[0])
        np.testing.assert_array_equal(rows["user"], before["user"])
    assert served.collection.sharing == () and "updates" not in served.arrays()
    np.testing.assert_array_equal(embed(BATCH)["item"], before["item"])
    own, user = nnx.clone(served), embed.tables["user"].embedding
    assert served.tables["user"].embedding is user
    assert own.tables["user"].embedding is not user

    described, state = embed.collection, embed.arrays()
    after, arrays = described.with_tables(state, {"item": made("tt_sum")})
    got, _ = jax_tt.lookup_features(after, arrays, BATCH)
    np.testing.assert_allclose(got["item"], jax_tt.lookup_bags(*made("tt_sum"), IDS)[0], rtol=1e-5)

    module = jax_tt.linen.EmbedCollection(*collection(optimizer))
    variables = module.init(jax.random.key(0), BATCH)
    replaced = functools.partial(jax_tt.Collection.with_tables, tables={"item": made("quantized")})
    changed, small = jax_tt.linen.update_table(module, variables, replaced)
    rows = changed.layer.apply(small, BATCH)
    np.testing.assert_array_equal(rows["item"], jax_tt.lookup_bags(*made("quantized"), IDS)[0])
    np.testing.assert_array_equal(rows["user"], module.apply(variables, BATCH)["user"])
    assert set(small) == {"params", "quantized"}


def test_replacements_that_do_not_fit():
    embed = jax_tt.EmbedCollection(*collection(), rngs=nnx.Rngs(0))
    shape = r"tables\['user'\]: got 101 rows x 8 columns; expected 20 rows x 8"
    for tables, message in (
        ({"ad": made("tt")}, "tables: got the table 'ad'; expected some of 'item', 'user'"),
        ([made("tt")], "tables: got a list; expected results"),
        ({"user": made("tt")}, shape),
        ({"item": None}, "source: got None; expected the result of jax_tt.compress"),
        ({"item": made("tt")[0]}, r"source: got an \w*Table; expected .* a tuple of a table and"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            embed.replaced(tables)


def test_tables_that_are_trained_or_take_keys_are_no_replacements():
    tables, features = collection()
    embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    update = jax_tt.Update(jax_tt.optimizers.SGD(0.1))
    fused = jax_tt.tables.DenseTable(N, D, update=update)
    with pytest.raises(
        ValueError, match=r"tables\['item'\]: got a table with an optimizer.*freeze"
    ):
        embed.replaced({"item": (fused, fused.init(jax.random.key(0)))})
    keys = jax_tt.hash_table(24, D)
    wide = {"user": jax_tt.dense_table(24, D)}
    embed = jax_tt.EmbedCollection(wide, {"user": features["user"]}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="got a HashTable for a DenseTable"):
        embed.replaced({"user": (keys, keys.init(jax.random.key(0)))})
    state = {"embedding": jnp.ones((24, D + 1))}
    with pytest.raises(ValueError, match="embedding"):
        embed.replaced({"user": (wide["user"], state)})


def test_layers_of_one_kind_say_which_layer_reads_the_others(tmp_path):
    path = saved(tmp_path, "quantized")
    for layer in (jax_tt.Embed, jax_tt.TTEmbedBag):
        with pytest.raises(jax_tt.FileError, match=r"'quantized'.*TableEmbed.from_pretrained"):
            layer.from_pretrained(path)
    with pytest.raises(TypeError, match=r"QuantizedTable.*TableEmbed.from_pretrained"):
        jax_tt.TTEmbedBag.from_pretrained(made("quantized"))


def test_sums_in_damaged_files(tmp_path):
    path = saved(tmp_path, "tt_sum")
    whole = path.read_bytes()

    def spoil(arrays, notes):
        arrays |= {name: x * np.nan for name, x in arrays.items() if name.endswith("core_1")}

    def forget(arrays, notes):
        for name in [name for name in arrays if "table_1" in name]:
            del arrays[name]

    for change, message in ((spoil, "NaN or infinity"), (forget, "table_1_core_0")):
        path.write_bytes(whole)
        rewrite(path, change)
        with pytest.raises(jax_tt.FileError, match=message):
            jax_tt.files.load(path)


def test_bytes_of_quantized_rows_are_not_trained():
    update = jax_tt.Update(jax_tt.optimizers.Adagrad(0.1))
    rows = np.ones((10, 8), np.float32)
    fix = r"got uint8 .* jax_tt\.quantize\(rows, bits=8, update=update\) makes it of rows"
    with pytest.raises(ValueError, match=fix):
        jax_tt.TableEmbed.from_pretrained(jax_tt.quantize(rows), update=update)
    jax_tt.TableEmbed.from_pretrained(jax_tt.quantize(rows, update=update))

"""`from_pretrained` of the layers, from every source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.helpers import SHAPES, dense_table, make_case

SHAPE = SHAPES["d3-odd"]
N = SHAPE.num_embeddings  # five rows fewer than the cores address
CORES = make_case(SHAPE, "float32", False).cores
TABLE = dense_table(CORES, N).astype(np.float32)
IDS = np.array([[0, 7, 7], [N - 1, 3, 50]], np.int32)
ORDER = jax_tt.order.from_counts(np.random.default_rng(0).permutation(N) + 1)


def close(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def tensor(array):
    torch = pytest.importorskip("torch")
    return torch.tensor(array)


def saved(path, arrays):
    """The arrays in a file of the suffix that the path has."""
    if path.suffix == ".npy":
        (array,) = arrays.values()
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".pt":
        torch = pytest.importorskip("torch")
        torch.save({name: tensor(array) for name, array in arrays.items()}, path)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(arrays, path)
    else:
        checkpoint = pytest.importorskip("orbax.checkpoint")
        with checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, arrays)
    return path


FILES = ("one.npy", "one.npz", "one.safetensors", "one.pt", "one")


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, tensor, *FILES])
def test_dense(kind, tmp_path):
    source = saved(tmp_path / kind, {"w": TABLE}) if isinstance(kind, str) else kind(TABLE)
    layer = jax_tt.EmbedBag.from_pretrained(source, combiner="max")
    np.testing.assert_array_equal(layer(IDS), TABLE[IDS].max(1))


@pytest.mark.parametrize("kind", [np.asarray, "one.npz"])
def test_tensor_train_of_a_dense_table(kind, tmp_path):
    source = saved(tmp_path / kind, {"w": TABLE}) if isinstance(kind, str) else kind(TABLE)
    factors = {"row_factors": SHAPE.row_factors, "col_factors": SHAPE.col_factors}
    options = {"tt_ranks": SHAPE.ranks, **factors}
    close(jax_tt.TTEmbed.from_pretrained(source, **options)(IDS), TABLE[IDS])


def test_how_well_a_dense_table_is_approximated():
    rows = np.sin(np.arange(8000.0)).reshape(1000, 8)
    for options in ({"tolerance": 1e-3}, {"max_bytes": 4000}, {"tt_ranks": 2}):
        layer = jax_tt.TTEmbedBag.from_pretrained(rows, id_order=None, **options)
        close(layer(IDS), rows[IDS].sum(1), 1e-2)
    ordered = jax_tt.TTEmbed.from_pretrained(TABLE, id_order=ORDER, tolerance=1e-6)
    close(ordered(IDS), TABLE[IDS])


def test_cores_and_approximations():
    kinds = (tuple(CORES), list(CORES), tuple(map(np.asarray, CORES)))
    for cores in kinds:
        layer = jax_tt.TTEmbed.from_pretrained(cores, num_embeddings=N, bounds="zero")
        assert layer.num_embeddings == N
        close(layer(IDS), TABLE[IDS])
        assert not np.any(layer(np.array([N])))
    assert jax_tt.TTEmbed.from_pretrained(CORES).num_embeddings == SHAPE.num_rows
    found = jax_tt.tt.from_dense(TABLE, shape=SHAPE)
    close(jax_tt.TTEmbed.from_pretrained(found)(IDS), TABLE[IDS])
    stored = jax_tt.tt.to_table(found, ORDER)
    close(jax_tt.TTEmbed.from_pretrained(stored)(IDS), TABLE[ORDER.apply(IDS)])
    mapped = jax_tt.TTEmbed.from_pretrained(CORES, id_order=ORDER, num_embeddings=N)
    close(mapped(IDS), TABLE[ORDER.apply(IDS)])


@pytest.mark.parametrize("name", ["items.safetensors", "items"])
def test_files_of_tables(name, tmp_path):
    path = tmp_path / name
    other = jax_tt.tt.init(jax.random.key(0), SHAPES["d2"])
    tables = {
        "items": jax_tt.tt.to_table(CORES, ORDER, num_embeddings=N),
        "shops": jax_tt.tt.to_table(other, num_embeddings=SHAPES["d2"].num_embeddings),
    }
    jax_tt.files.save(path, tables)
    layer = jax_tt.TTEmbed.from_pretrained(path, table="items")
    close(layer(IDS), TABLE[ORDER.apply(IDS)])
    shops = jax_tt.TTEmbedBag.from_pretrained(str(path), table="shops", combiner="mean")
    assert shops.num_embeddings == 50
    with pytest.raises(
        jax_tt.FileError, match=r"2 tensor trains; say which by table=: items, shop"
    ):
        jax_tt.TTEmbed.from_pretrained(path)
    with pytest.raises(jax_tt.FileError, match="table: got 'user'; expected one of items, shops"):
        jax_tt.TTEmbed.from_pretrained(path, table="user", tt_ranks=2)


def test_a_checkpoint_of_a_model_beside_other_arrays(tmp_path):
    arrays = {f"items.core_{k}": np.asarray(core) for k, core in enumerate(CORES)}
    arrays |= {"head": np.ones((15, 2), np.float32), "users": TABLE}
    path = saved(tmp_path / "model.npz", arrays)
    close(jax_tt.TTEmbed.from_pretrained(path, num_embeddings=N)(IDS), TABLE[IDS])
    users = jax_tt.TTEmbed.from_pretrained(path, table="users", tolerance=1e-6)
    close(users(IDS), TABLE[IDS])
    close(jax_tt.EmbedBag.from_pretrained(path, table="users")(IDS), TABLE[IDS].sum(1))
    with pytest.raises(jax_tt.FileError, match=r"say which by table=: head, users"):
        jax_tt.EmbedBag.from_pretrained(path)


def test_nothing_random_is_made_and_nothing_is_shared(monkeypatch):
    def fail(*args, **options):
        raise AssertionError("random values")

    for name in ("uniform", "normal", "truncated_normal", "split"):
        monkeypatch.setattr(jax.random, name, fail)
    given = jnp.asarray(TABLE)
    layer = jax_tt.EmbedBag.from_pretrained(given)
    cores = jax_tt.TTEmbed.from_pretrained(CORES)
    monkeypatch.undo()
    host = TABLE.copy()
    of_host = jax_tt.EmbedBag.from_pretrained(host)
    host[:] = 0
    np.testing.assert_array_equal(of_host.embedding[...], TABLE)
    # A donated step may take the layer's arrays, and never those of the caller.
    step = nnx.jit(lambda model: None, donate_argnums=0)
    step(layer)
    step(cores)
    np.testing.assert_array_equal(given, TABLE)
    assert np.isfinite(CORES[0]).all()


def test_a_linen_model_begins_with_the_given_tables():
    update = jax_tt.Update(jax_tt.optimizers.Adagrad(0.1))

    class Tower(nn.Module):
        items: nn.Module
        shops: nn.Module

        def __call__(self, ids):
            return self.items(ids).sum(1) + self.shops(ids)

    model = Tower(
        jax_tt.linen.TableEmbed.from_pretrained(CORES, update=update),
        jax_tt.linen.TableEmbed.from_pretrained(TABLE, update=update, combiner="sum"),
    )
    variables, apply = jax.jit(model.init)(jax.random.key(0), IDS), jax.jit(model.apply)
    close(apply(variables, IDS), 2 * TABLE[IDS].sum(1))
    # What the variables hold counts, once there are some.
    (tables,) = variables.values()
    tables["shops"]["embedding"] = jnp.zeros_like(TABLE)
    close(apply(variables, IDS), TABLE[IDS].sum(1))


ERRORS = [
    ("EmbedBag", np.ones(3), {}, r"source: got float64 of shape \(3,\); expected floats \[num_"),
    ("EmbedBag", np.ones((3, 2), int), {}, "source: got int64"),
    ("EmbedBag", CORES, {}, "source"),
    ("EmbedBag", TABLE, {"table": "w"}, "table: got 'w'.*no path"),
    ("EmbedBag", TABLE, {"num_embeddings": N, "rngs": 0}, "got num_embeddings, rngs, which"),
    ("TTEmbed", CORES, {"features": 8}, "got features, which the source"),
    ("TTEmbed", CORES, {"id_order": [1, 0]}, "id_order: got a list"),
    ("TTEmbed", TABLE, {"tt_ranks": 2, "id_order": [1, 0]}, "id_order: got a list"),
    ("TTEmbed", TABLE, {}, "tt_ranks, tolerance, max_bytes: got none of them"),
    ("TTEmbed", TABLE, {"tt_ranks": 2, "num_embeddings": 3}, "num_embeddings: got 3 for a dense"),
    ("TTEmbed", CORES, {"tolerance": 0.1}, r"tolerance: got a value.*tt\.round"),
    ("TTEmbed", CORES, {"num_embeddings": 1000}, "num_embeddings: got 1000"),
    ("TTEmbed", CORES, {"table": "w"}, "table: got 'w'"),
    ("TTEmbed", "missing.npz", {}, "missing.npz"),
    ("TTEmbed", {"a": CORES, "b": CORES}, {}, "source: got a dict with 'a', 'b'; expected one"),
    ("EmbedBag", {"a": TABLE}, {}, "source: got a dict with 'a'"),
    ("TableEmbed", {"a": TABLE}, {}, "source: got a dict with 'a'"),
]


def test_errors_name_the_argument():
    for layer, source, options, message in ERRORS:
        with pytest.raises((ValueError, TypeError), match=message):
            getattr(jax_tt, layer).from_pretrained(source, **options)
    stored = jax_tt.tt.to_table(CORES, ORDER, num_embeddings=N)
    with pytest.raises(ValueError, match="id_order: got one for a source that has"):
        jax_tt.TTEmbed.from_pretrained(stored, id_order=ORDER)
    wide = (np.ones((2, 1, 1, 9), np.float32), np.ones((3, 9, 2, 1), np.float32))
    with pytest.raises(ValueError, match=r"ranks \(9,\).*\(2,\).*tt\.round"):
        jax_tt.TTEmbed.from_pretrained(wide)


@pytest.mark.parametrize("layer", ["EmbedBag", "TableEmbed"])
def test_files_do_not_lose_bits_without_a_warning(tmp_path, layer):
    np.save(tmp_path / "wide.npy", TABLE.astype(np.float64))
    with pytest.warns(
        UserWarning, match="wide.npy: arrays are float64, which JAX rounds"
    ) as warned:
        getattr(jax_tt, layer).from_pretrained(tmp_path / "wide.npy")
    assert [w.filename for w in warned] == [__file__]
    jax_tt.EmbedBag.from_pretrained(tmp_path / "wide.npy", param_dtype=jnp.float32)


def test_a_type_is_that_which_is_given_or_that_of_the_source():
    for layer in (jax_tt.EmbedBag, jax_tt.TTEmbedBag):
        source = TABLE if layer is jax_tt.EmbedBag else CORES
        half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), source)
        assert layer.from_pretrained(half, param_dtype=None).param_dtype == jnp.bfloat16
        assert layer.from_pretrained(source, param_dtype=jnp.bfloat16).param_dtype == jnp.bfloat16

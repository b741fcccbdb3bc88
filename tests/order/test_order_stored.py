"""Orders as layers and files keep them: packed, read one by one, and checked where a file brings them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt._ids import stored_order
from jax_tt.order import IdOrder

MANY = 2**16 + 77


def permutation(count, seed=0):
    return np.random.default_rng(seed).permutation(count)


@given(count=st.integers(2, 5000), seed=st.integers(0, 9))
@settings(max_examples=100)
def test_packed_rows_come_back(count, seed):
    rows = permutation(count, seed)
    words = stored_order.pack(rows)
    assert words.shape == (-(-count // 32), count.bit_length())
    assert np.array_equal(stored_order.on_host(words), rows)


@pytest.mark.parametrize("count", [2, 31, 33, 2**16 + 1])
def test_any_row_is_read_alone(count):
    rows = permutation(count)
    packed = stored_order.StoredRows(jnp.asarray(stored_order.pack(rows)), count)
    assert np.array_equal(packed.whole(), rows)
    ids = np.random.default_rng(1).integers(0, count, (3, 50)).astype(np.int32)
    none = np.zeros(0, np.int32)
    reads = jax.jit(lambda *given: [*map(packed.at, given), jax.vmap(packed.at)(given[0])])
    *found, empty, mapped = reads(ids, ids.astype(np.uint32), none)
    for read in (*found, mapped):
        assert np.array_equal(read, rows[ids])
    assert empty.shape == (0,)


def test_places_of_the_last_ids_stay_within_32_bits():
    ids = [0, 31, 32, 2**30 + 17, 2**31 - 34, 2**31 - 2]
    block, word, shift = stored_order.places(jnp.asarray(ids, jnp.int32), 31)
    for k, value in enumerate(ids):
        bit = value % 32 * 31
        assert (int(block[k]), int(word[k]), int(shift[k])) == (value // 32, bit // 32, bit % 32)
        # What a gather counts with, in words.
        assert 0 <= int(block[k]) * 31 + int(word[k]) < 2**31 - 1


def test_bytes_are_those_that_a_layer_keeps():
    for count, dtype, nbytes in [
        (1, "uint16", 2),
        (2**16, "uint16", 2**17),
        (2**16 + 1, "uint32", 2049 * 17 * 4),
    ]:
        order = IdOrder(permutation(count))
        kept = stored_order.on_device(order.rows)
        assert kept.dtype == dtype and kept.nbytes == order.nbytes == nbytes
        assert np.array_equal(stored_order.on_host(kept), order.rows)


def test_orders_beyond_32_bits_take_64():
    assert stored_order.kept_bytes(2**31 - 1) == 2**26 * 31 * 4
    assert stored_order.kept_bytes(2**31) == 2**34


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_layers_of_many_ids(flavour):
    order = IdOrder(permutation(MANY))
    ids = np.array([[0, 65_535, 65_536], [MANY - 1, 12_345, 0]], np.int32)
    if flavour == "nnx":
        ordered, plain = (
            jax_tt.TTEmbed(MANY, 4, tt_ranks=2, id_order=rows, rngs=nnx.Rngs(0))
            for rows in (order, None)
        )
        kept = ordered.id_order[...]
    else:
        modules = [
            jax_tt.linen.TableEmbed(jax_tt.tt_table(MANY, 4, tt_ranks=2, id_order=rows))
            for rows in (order, None)
        ]
        both = [module.init(jax.random.key(0), ids) for module in modules]
        ordered, plain = (module.bind(own) for module, own in zip(modules, both, strict=True))
        kept = both[0]["id_order"]["id_order"]
    assert kept.nbytes == order.nbytes < 2.2 * MANY
    assert IdOrder(kept) == order
    query = jnp.ones((1, 4))
    rows, scores = jax.jit(lambda: (ordered(ids), ordered.attend(query)))()
    want, of_rows = jax.jit(lambda: (plain(order.rows[ids]), plain.attend(query)))()
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(scores, np.asarray(of_rows)[:, order.rows])


def test_what_is_no_id_stays_so():
    order = IdOrder(permutation(MANY))
    bags = jax_tt.TTEmbedBag(MANY, 4, tt_ranks=2, id_order=order, bounds="zero", rngs=nnx.Rngs(0))
    given = jax_tt.Bags.from_padded([[5, -1], [MANY, 7], [-7, -1]])
    found, dense = jax.jit(lambda: (bags(given), jax_tt.tt.to_dense(bags.cores, MANY)))()
    rows = np.asarray(dense)[order.rows[np.array([5, 7])]]
    np.testing.assert_allclose(found[:2], rows, rtol=1e-5, atol=1e-7)
    assert not np.any(found[2])


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_files_keep_them_packed(tmp_path, suffix):
    order, shape = IdOrder(permutation(MANY)), jax_tt.TTShape.suggest(MANY, 4, ranks=1)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    path = tmp_path / f"table{suffix}"
    jax_tt.files.save(path, {"items": jax_tt.tt.to_table(cores, order, num_embeddings=MANY)})
    held = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    assert held < order.nbytes + 4 * shape.num_params + 20_000
    table, _ = jax_tt.files.load(path)["items"]
    assert table.id_order == order and table.table.shape == shape


def test_checkpoints_of_layers_say_how_many_ids_there_are(tmp_path):
    order = IdOrder(permutation(MANY))
    layer = jax_tt.TTEmbed(MANY, 4, tt_ranks=1, id_order=order, rngs=nnx.Rngs(0))
    path = (tmp_path / "state").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state(layer)))
    ((table, _),) = jax_tt.files.load(path).values()
    assert table.id_order == order and table.num_embeddings == MANY


def test_damaged_ones_are_refused(tmp_path):
    words = stored_order.pack(permutation(1000))
    swapped = words.copy()
    swapped[0] = swapped[1]
    cores = {"x.core_0": np.ones((40, 1, 2, 2)), "x.core_1": np.ones((40, 2, 2, 1))}
    for name, (rows, message) in {
        "nothing": (np.zeros((0, 0), np.uint32), "rows packed as layers"),
        "one number": (np.int32(5), r"rows: got .*shape \(\); expected \[N\]"),
        "a table": (np.zeros((3, 2), np.int32), r"rows: got .*shape \(3, 2\); expected \[N\]"),
        "no blocks": (np.zeros((0, 10), np.uint32), "rows packed as layers"),
        "no bits": (np.zeros((4, 0), np.uint32), "rows packed as layers"),
        "too many bits": (np.zeros((4, 32), np.uint32), "rows packed as layers"),
        "a block too few": (words[:-1], "got the row|is missing"),
        "a block too many": (np.pad(words, ((0, 1), (0, 0))), "rows packed as layers"),
        "other bits": (np.pad(words, ((0, 0), (0, 1))), "got the row|is missing"),
        "nothing in the last block": (np.full((3, 7), 2**32 - 1, np.uint32), "got the row 127"),
        "twice the same": (swapped, "is missing, so that another is there twice"),
    }.items():
        with pytest.raises(ValueError, match=message):
            IdOrder(rows)
        path = tmp_path / f"{name}.npz"
        np.savez(path, **cores, **{"x.id_order": rows})
        with pytest.raises(ValueError, match=r"x\.id_order is no order of ids"):
            jax_tt.files.load(path)


def test_what_is_too_large_is_refused_by_its_last_block():
    class Bomb:
        shape, ndim, dtype = (10**7, 1), 2, np.dtype(np.uint32)

        def __getitem__(self, rows):
            assert rows == slice(-1, None)
            return np.zeros((1, 1), np.uint32)

    with pytest.raises(ValueError, match="rows packed as layers"):
        stored_order.count_of(Bomb())


@pytest.mark.parametrize("count", [60, MANY])
def test_layers_of_traced_orders(count):
    order, ids = IdOrder(permutation(count)), jnp.array([0, 5, count - 1])

    def rows(order, ids):
        return jax_tt.TTEmbed(count, 4, tt_ranks=2, id_order=order, rngs=nnx.Rngs(0))(ids)

    wanted = jax.jit(lambda ids: [rows(known, ids) for known in (order, order.inverse)])(ids)
    np.testing.assert_allclose(jax.jit(rows)(order, ids), wanted[0], rtol=1e-6)
    both = jax.tree.map(lambda *two: np.stack(two), order, order.inverse)
    found = jax.jit(jax.vmap(rows, (0, None)))(both, ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("count", [60, MANY])
def test_an_order_of_another_size_is_refused(count):
    layer, larger = (
        jax_tt.TTEmbed(
            n,
            4,
            tt_ranks=1,
            row_factors=(50, 50, 50),
            id_order=IdOrder.identity(n),
            rngs=nnx.Rngs(0),
        )
        for n in (count, count + 100)
    )
    nnx.update(larger, nnx.state(layer))
    for use in (larger, larger.attend):
        with pytest.raises(
            ValueError, match=f"the layer has {count + 100} ids and holds an order of"
        ):
            use(jnp.zeros(4, jnp.int32) if use is larger else jnp.zeros((1, 4)))


def test_raw_rows_of_any_integer_type_are_read():
    rows = permutation(60)
    layer = jax_tt.TTEmbed(60, 4, tt_ranks=2, id_order=IdOrder(rows), rngs=nnx.Rngs(0))
    ids = jnp.arange(60)
    wanted = layer(ids)
    for dtype in (jnp.uint32, jnp.int32):
        layer.id_order.set_value(jnp.asarray(rows, dtype))
        np.testing.assert_array_equal(layer(ids), wanted)


def test_nothing_changes_where_a_grown_order_does_not_fit_its_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    count = 2**16
    layer = jax_tt.TTEmbed(
        count,
        4,
        tt_ranks=1,
        row_factors=(32, 32, 64),
        id_order=IdOrder.identity(count),
        rngs=nnx.Rngs(0),
    )
    rows = jax.device_put(layer.id_order[...], NamedSharding(mesh, P("x")))
    layer.id_order.set_value(rows)
    shape, cores = layer.tt_shape, [core.shape for core in layer.cores]
    with pytest.raises(ValueError, match="divi"):
        layer.grow(66_000, rngs=nnx.Rngs(1))
    assert (layer.tt_shape, layer.num_embeddings) == (shape, count)
    assert [core.shape for core in layer.cores] == cores

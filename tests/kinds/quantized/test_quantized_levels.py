"""Quantized tables whose levels are not uniform, and those whose columns are rotated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.levels import separated
from tests.conftest import WAYS, method_fixture
from tests.helpers import bag_model, flat, to_dense
from tests.kinds.quantized.test_quantized_tables import (
    bytes_of,
    check_bags,
    decoded,
    encoded,
    random_rows,
    scales_of,
)

# Given levels are scaled to the range of the numbers.
LEVELS = {
    4: tuple(np.sinh(np.linspace(-2, 2, 16))),
    3: (-3, -1.5, -1, -0.25, 0, 0.5, 1.5, 4),
    2: (0, 1, 4, 5),
}
BITS = tuple(LEVELS)

method = method_fixture(*WAYS)


@functools.cache
def table_of(bits, n=40, features=13, rotation=None):
    return jax_tt.quantize(
        random_rows(n, features), bits, levels=LEVELS[bits], rotation=rotation, seed=1
    )


@functools.cache
def random_rotation(features):
    return np.linalg.qr(random_rows(features, features, 5))[0]


def errors(table, state, rows):
    return np.sum((np.asarray(to_dense(table, state)) - rows) ** 2, axis=1)


@pytest.mark.parametrize("bits", BITS)
def test_numbers_are_those_of_the_nearest_levels(bits):
    rows = random_rows(30, 13)
    rows[3], rows[4, 1:] = 2.5, 0
    table, state = jax_tt.quantize(rows, bits, levels=LEVELS[bits])
    assert table.levels is not None
    own = np.asarray(table.levels)
    given = np.asarray(LEVELS[bits], np.float64)
    np.testing.assert_allclose(own, np.interp(given, given[[0, -1]], [0, 2**bits - 1]), atol=1e-3)
    np.testing.assert_array_equal(own * 512, np.rint(own * 512))
    # Scales and offsets are those of uniform levels.
    _, uniform = jax_tt.quantize(rows, bits)
    np.testing.assert_array_equal(state["packed"][:, :4], uniform["packed"][:, :4])
    scale, offset = (np.asarray(x, np.float64) for x in codec.header(state["packed"]))
    at = (rows - offset[:, None]) / scale[:, None]
    nearest = np.abs(at[..., None] - own).argmin(-1)
    codes = np.asarray(codec.unpacked(state["packed"][:, 4:], 13, bits))
    np.testing.assert_array_equal(codes, nearest)
    np.testing.assert_array_equal(
        to_dense(table, state), (scale[:, None] * own[codes] + offset[:, None]).astype(np.float32)
    )
    assert table.nbytes == state["packed"].nbytes


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("bits", BITS)
def test_bags_equal_those_of_the_dense_table(method, bits):
    check_bags(table_of, method, bits, weighted=[True])


def test_rotations_are_after_the_levels():
    rows = random_rows(40, 13)
    table, state = jax_tt.quantize(rows, 4, rotation=random_rotation(13))
    plain, unturned = jax_tt.quantize(rows @ random_rotation(13).T, 4)
    assert table.rotated and not plain.rotated
    np.testing.assert_array_equal(state["packed"], unturned["packed"])
    want = np.asarray(to_dense(plain, unturned)) @ random_rotation(13)
    np.testing.assert_allclose(to_dense(table, state), want, rtol=1e-5, atol=1e-5)
    assert table.nbytes == sum(array.nbytes for array in state.values())


def test_lookups_in_rotated_tables(method):
    table, state = table_of(3, rotation="random")
    ids, weights = [[3, 3], [], [39, 0, 3]], [[0.5, 2.0], [], [1.0, 3.0, 0.25]]
    bags, g = jax_tt.Bags.from_ragged(ids, weights), random_rows(3, 13, 1)

    @jax.jit
    def run(weights):
        def loss(weights, combiner):
            given = dataclasses.replace(bags, weights=weights)
            lookup = jax_tt.Lookup(combiner, method=method)
            rows, _ = jax_tt.lookup_bags(table, state, given, lookup)
            return jnp.vdot(rows, g), rows

        nothing, _ = jax_tt.lookup(table, state, jnp.zeros((0, 2), jnp.int32), method=method)
        return jax.grad(loss, has_aux=True)(weights, "mean"), loss(None, "max")[1], nothing

    (gradient, mean), largest, nothing = run(bags.weights)
    dense = np.asarray(to_dense(table, state))
    want, _, of_weights = bag_model(dense, ids, weights, "mean", g)
    np.testing.assert_allclose(mean, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, flat(of_weights), rtol=1e-4, atol=1e-5)
    want, *_ = bag_model(dense, ids, None, "max", g)
    np.testing.assert_allclose(largest, want, rtol=1e-4, atol=1e-5)
    assert nothing.shape == (0, 2, 13)


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_in_a_collection(method, layout):
    """Levels are beside uniform ones in one native call; a rotated table has its own."""
    made = {
        "four": table_of(4),
        "three": table_of(3, 9, 24),
        "uniform": jax_tt.quantize(random_rows(30, 16), 4),
        "turned": table_of(2, 30, 16, "random"),
    }
    features = {name: jax_tt.Feature(name) for name in made}
    collection = jax_tt.Collection({name: table for name, (table, _) in made.items()}, features)
    state = collection.joined({name: state for name, (_, state) in made.items()})
    batch = {
        name: jnp.array([[8], [0], [3]]) % table.num_embeddings for name, (table, _) in made.items()
    }
    look_up = jax.jit(
        lambda state, batch: jax_tt.lookup_features(
            collection, state, batch, jax_tt.Lookup(method=method), layout=layout
        )[0]
    )
    if method == "native":
        text = look_up.lower(state, batch).as_text()
        assert text.count("dense_forward") == 2  # the rotation of one of them follows its sums
    found = look_up(state, batch)
    if layout == "features":
        found = jnp.concatenate([found[name] for name in made], axis=1)
    want = [to_dense(table, own)[batch[name][:, 0]] for name, (table, own) in made.items()]
    np.testing.assert_allclose(found, jnp.concatenate(want, axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_divided_over_devices():
    plain, state = table_of(4, 40, 16)
    mesh = jax.make_mesh((4,), ("model",))
    table = jax_tt.tables.ShardedTable(plain, mesh, "model", jax_tt.Placement.hashed())
    ids = jnp.arange(40).reshape(8, 5)
    look_up = jax.jit(lambda state: jax_tt.lookup(table, state, ids)[0])
    np.testing.assert_array_equal(look_up(table.of_rows(state)), to_dense(plain, state)[ids])


def test_layers():
    table, state = table_of(4, rotation="random")
    ids, query = jnp.array([1, 39]), jnp.ones((2, 13))
    dense = np.asarray(to_dense(table, state))
    layer = jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.rotation[...], jnp.eye(13))
    layer.packed[...], layer.rotation[...] = state["packed"], state["rotation"]
    rows, scores = nnx.jit(lambda layer: (layer(ids), layer.attend(query)))(layer)
    np.testing.assert_allclose(rows, dense[ids], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, query @ dense.T, rtol=1e-4, atol=1e-4)
    assert not jax.tree.leaves(nnx.state(layer, nnx.Param))
    linen = jax_tt.linen.TableEmbed(table)
    variables = {"quantized": dict(state)}
    shapes = jax.eval_shape(linen.init, jax.random.key(0), ids)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)
    np.testing.assert_array_equal(jax.jit(linen.apply)(variables, ids), rows)


def test_export_and_orders_of_ids():
    table, state = table_of(3, rotation="random")
    order = jax_tt.order.IdOrder(np.arange(40)[::-1])
    ordered = jax_tt.tables.OrderedTable(table, order)
    state = {**jax.jit(ordered.init)(jax.random.key(0)), **state}
    ids = jnp.array([[3, 4]])
    look_up = jax.jit(lambda state, ids: jax_tt.lookup_bags(ordered, state, ids)[0])
    program = jax.export.export(look_up, disabled_checks=jax_tt.export.checks())
    stored = program(state, ids).serialize()
    got = jax.export.deserialize(stored).call(state, ids)
    want = np.asarray(to_dense(table, state))[[36, 35]].sum(0)[None]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Fits


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_clipping_makes_no_row_worse(bits):
    rows = np.random.default_rng(0).standard_t(3, size=(300, 24)).astype(np.float32)
    rows[:50] *= 1e-4
    rows[50:60] *= 1e4
    rows[60], rows[61], rows[62] = 2.5, 0, np.eye(24)[3]
    plain = errors(*jax_tt.quantize(rows, bits), rows)
    clipped = errors(*jax_tt.quantize(rows, bits, clip=True), rows)
    assert (clipped <= plain * (1 + 1e-4) + 1e-12).all()
    if bits < 4:
        assert clipped.sum() < 0.85 * plain.sum()
    given = LEVELS.get(bits)
    if given is not None:
        plain = errors(*jax_tt.quantize(rows, bits, levels=given), rows)
        clipped = errors(*jax_tt.quantize(rows, bits, levels=given, clip=True), rows)
        assert (clipped <= plain * (1 + 1e-4) + 1e-12).all()


@pytest.mark.slow
def test_fitted_tables_have_smaller_errors():
    """Columns that are sums of a few skewed numbers."""
    rng = np.random.default_rng(0)
    rows = (rng.exponential(size=(500, 16)) @ rng.normal(size=(16, 16))).astype(np.float32)
    ways = [{"clip": True}, {"levels": "fit"}, {"levels": "fit", "rotation": "fit"}]
    made = [jax_tt.quantize(rows, 2, **options) for options in ways]
    found = [errors(*one, rows).sum() for one in made]
    assert found[0] > found[1] > found[2]
    again, state = jax_tt.quantize(rows, 2, levels="fit", rotation="fit")
    assert again == made[2][0]
    for name, array in state.items():
        np.testing.assert_array_equal(array, made[2][1][name])
    rotation = np.asarray(state["rotation"], np.float64)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(16), atol=1e-5)
    # A fit without a rotation, and one of the rotation alone.
    uniform, _ = jax_tt.quantize(rows, 2, rotation="fit")
    assert uniform.levels is None and uniform.rotated


@pytest.mark.slow
def test_fits_depend_on_weights():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(100, 16)), rng.exponential(size=(100, 16)) ** 2])
    rows = rows.astype(np.float32)
    plain = errors(*jax_tt.quantize(rows, 2, levels="fit"), rows)
    for k in range(2):
        weights = np.where(np.arange(200) // 100 == k, 1.0, 1e-3)
        weighted = errors(*jax_tt.quantize(rows, 2, levels="fit", weights=weights), rows)
        assert weights @ weighted < weights @ plain


@pytest.mark.slow
def test_random_rotations_even_out_columns():
    rows = random_rows(500, 32) * np.geomspace(1, 100, 32).astype(np.float32)
    table, state = jax_tt.quantize(rows, 4, rotation="random", seed=3)
    rotation = np.asarray(state["rotation"])
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(32), atol=1e-5)
    assert errors(table, state, rows).sum() < 0.7 * errors(*jax_tt.quantize(rows, 4), rows).sum()
    again = jax_tt.quantize(rows, 4, rotation="random", seed=3)[1]
    np.testing.assert_array_equal(again["rotation"], rotation)
    assert (jax_tt.quantize(rows, 4, rotation="random")[1]["rotation"] != rotation).any()


def test_rows_with_few_different_numbers():
    """Some of the levels stand for nothing."""
    rows = np.where(random_rows(100, 8) > 0, 3.0, -1.0).astype(np.float32)
    table, state = jax_tt.quantize(rows, 4, levels="fit")
    np.testing.assert_allclose(to_dense(table, state), rows, atol=1e-2)
    assert separated(np.array([0.0, 1, 1, 1]), 2) == (0, 3 - 2 / 512, 3 - 1 / 512, 3)
    assert separated(np.zeros(4), 2) == (0, 1 / 512, 2 / 512, 3 / 512)


@pytest.mark.slow
def test_rows_are_read_in_blocks(monkeypatch, tmp_path):
    rows = random_rows(50, 13)
    want = jax_tt.quantize(rows, 3, levels="fit", rotation="random")
    monkeypatch.setattr("jax_tt._compress.quantize.BLOCK", 64)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    found = jax_tt.quantize(mapped, 3, levels="fit", rotation="random")
    assert found[0] == want[0]
    np.testing.assert_allclose(to_dense(found[0], found[1]), to_dense(want[0], want[1]), atol=1e-2)


# Training


def step_of(table, state, method):
    """The state after a step, by bags that read row 3 twice, and the gradient of their weights."""
    bags = jax_tt.Bags.from_ragged([[3, 3, 39], [], [0, 3]], [[0.5, 2.0, 1.0], [], [-1.0, 1.5]])

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def step(own, weights):
        given = dataclasses.replace(bags, weights=weights)
        out, _ = jax_tt.lookup_bags(table, {**state, **own}, given, method=method)
        return jnp.sum(jnp.sin(out))

    return step({name: state[name] for name in table.spec.trained_names}, bags.weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_step_is_that_of_the_dense_table_rounded(method, bits):
    update = jax_tt.Update(optimizers.Adagrad(0.1), stochastic_rounding=False)
    options = {"levels": LEVELS[4]} if bits == 4 else {}
    rotation = random_rotation(16)
    table, state = jax_tt.quantize(
        random_rows(40, 16), bits, rotation=rotation, update=update, **options
    )
    # Adagrad steps each number by itself, so that the dense table has the rows before the rotation.
    plain = dataclasses.replace(table, rotated=False)
    before = np.asarray(to_dense(plain, state), np.float64)
    new, of_weights = step_of(table, state, method)
    assert "rotation" not in new
    touched, given = np.array([3, 0, 39]), np.array([[2.5, 0, 1], [0] * 3, [1.5, -1, 0]])
    rows = before[touched] @ rotation
    cosines = np.cos(given @ rows)
    gradient = given.T @ cosines @ rotation.T
    want = before[touched] - 0.1 * gradient / (np.sqrt(gradient**2) + 1e-10)
    packed = bytes_of(state).copy()
    packed[touched] = encoded(want, bits, table.levels)
    expected = decoded(packed, 16, bits, table.levels)
    found = to_dense(plain, {"packed": new["packed"]})
    # A number in the middle between two levels may be rounded to either.
    scale = scales_of(packed)
    assert (np.abs(found - expected) <= 4 * scale).all()
    assert (np.abs(found - expected) <= 1e-3 * scale + 1e-5).mean() > 0.99
    rest = np.setdiff1d(np.arange(40), touched)
    np.testing.assert_array_equal(bytes_of(new)[rest], packed[rest])
    wanted = [cosines[b] @ rows[i] for b, i in ((0, 0), (0, 0), (0, 2), (2, 1), (2, 0))]
    np.testing.assert_allclose(of_weights, np.stack(wanted), rtol=1e-3, atol=1e-3)
    frozen, own = jax_tt.extension.freeze(table, state | new)
    assert set(own) == {"packed", "rotation"}
    np.testing.assert_array_equal(to_dense(frozen, own), to_dense(table, state | new))


def test_stochastic_rounding_between_levels_is_exact_in_expectation():
    rows = jnp.asarray(random_rows(2, 16))
    levels = table_of(4)[0].levels
    keys = jax.random.split(jax.random.key(0), 10_000)

    @jax.jit
    def drawn(keys):
        def one(key):
            packed = codec.encoded_stochastically(rows, 4, jax.random.split(key), levels)
            return codec.decoded(packed, 16, 4, levels)

        return jax.vmap(one)(keys)

    found = np.asarray(drawn(keys), np.float64)
    spread = found.std(0)
    assert (np.abs(found.mean(0) - rows) <= 5 * spread / 100 + 1e-5).all()
    # Every number is rounded to the levels around it, which are at most two.
    for row, column in np.ndindex(*rows.shape):
        values = np.unique(found[:, row, column])
        assert len(values) <= 2
        assert values[0] - 1e-5 <= rows[row, column] <= values[-1] + 1e-5


# Files, and what is refused


def test_files(tmp_path):
    made = {"levels": table_of(4), "turned": table_of(2, rotation="random")}
    path = tmp_path / "small.safetensors"
    jax_tt.files.save(path, made)
    found = jax_tt.files.load(path)
    for name, (table, state) in made.items():
        assert found[name][0] == table and found[name][1].keys() == state.keys()
        for key, array in state.items():
            np.testing.assert_array_equal(found[name][1][key], array)
    table, state = made["turned"]
    state = {**state, "rotation": 2 * state["rotation"]}
    jax_tt.files.save(path, {"turned": (table, state)}, overwrite=True)
    with pytest.raises(jax_tt.FileError, match="'turned': rotation: got a matrix that is not orth"):
        jax_tt.files.load(path)


def test_arguments_that_do_not_fit():
    for options, message in [
        ({"bits": 8, "levels": "fit"}, "levels: got some for 8 bits; expected None, or 4, 3 or 2"),
        ({"levels": "best"}, "levels: got 'best'; expected one of 'uniform', 'fit', or a sequence"),
        ({"levels": (0, 1, 2)}, r"levels: got int64 of shape \(3,\); expected .* 4 increasing"),
        ({"levels": (0, 2, 1, 3)}, "levels: got .* expected finite numbers that increase"),
        ({"levels": (0, 1, np.nan, 3)}, "levels: got .* expected finite numbers that increase"),
        ({"levels": (0, 1e-5, 2, 3)}, "levels: got .* two are equal when the range is divided"),
        ({"rotation": "best"}, "rotation: got 'best'; expected one of 'fit', 'random'"),
        ({"rotation": np.eye(3)}, r"rotation: got .*shape \(3, 3\); expected \(4, 4\)"),
        ({"rotation": np.ones((4, 4))}, "rotation: got a matrix that is not orthogonal"),
        ({"weights": np.ones(9)}, "weights: got some, but nothing is fitted"),
        ({"weights": np.ones(3), "levels": "fit"}, r"weights: got .*shape \(3,\); expected \(9,\)"),
        ({"levels": "fit", "seed": 0.5}, "seed: got 0.5"),
        ({"clip": 0.9}, "clip: got 0.9; expected True, False or None"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            jax_tt.quantize(random_rows(9, 4), **{"bits": 2, **options})


def test_levels_of_no_table():
    for bits, levels, message in [
        (8, (0, 1), "t: levels: got some for 8 bits"),
        (2, [0, 1, 2, 3], "t: levels: got .*expected a tuple of 4 Python numbers"),
        (2, (0, 1, 2, np.float32(3)), "t: levels: got .*expected a tuple of 4 Python numbers"),
        (2, (0, 1, 3), "t: levels: got 3 numbers; expected 4 at 2 bits"),
        (2, (0, 2, 1, 3), "t: levels: got .*expected increasing numbers from 0 to 3"),
        (2, (0, 1, float("nan"), 3), "t: levels: got .*expected increasing numbers from 0 to 3"),
        (2, (0, 1, 2, 4), "t: levels: got .*expected increasing numbers from 0 to 3"),
        (2, (0, 1.001, 2, 3), "t: levels: got .*expected whole multiples of 1 / 512"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            jax_tt.tables.QuantizedTable(9, 4, bits, levels=levels, name="t")


def test_rows_that_are_not_finite_are_not_fitted():
    rows = random_rows(9, 4)
    rows[6, 2] = np.nan
    with pytest.raises(ValueError, match="small: rows: row 6 holds NaN or infinity"):
        jax_tt.quantize(rows, 2, levels="fit", name="small")


def test_what_has_no_levels_or_rotations():
    (levels, of_levels), (turned, state) = table_of(4), table_of(4, rotation="random")
    with pytest.raises(
        ValueError, match=r"got a table with levels that are not uniform; .* FBGEMM"
    ):
        jax_tt.compression.to_fbgemm(levels, of_levels)
    uniform = dataclasses.replace(turned, levels=None)
    with pytest.raises(ValueError, match=r"got a table with a rotation; .* FBGEMM's rows"):
        jax_tt.compression.to_fbgemm(uniform, state)
    mesh = jax.make_mesh((4,), ("model",))
    with pytest.raises(ValueError, match="rotated: got a table with a rotation, of which every"):
        jax_tt.tables.ShardedTable(uniform, mesh, "model", jax_tt.Placement.hashed())
    with pytest.raises(ValueError, match=r"rotation: got .*\(12, 12\); expected .*\(13,"):
        jax_tt.lookup(turned, {**state, "rotation": jnp.eye(12)}, jnp.array([1]))
    with pytest.raises(ValueError, match="state: has no rotation"):
        jax_tt.lookup(turned, of_levels, jnp.array([1]))

"""Slots are no ids: tables with tiers take nothing else, and no other table takes them."""

import jax
import numpy as np
import pytest
from flax import nnx

import jax_tt

RULE = jax_tt.optimizers.Adagrad(0.1)


def test_tables_with_tiers_take_slots_and_others_do_not(tmp_path):
    """A row on the device belongs to another id from batch to batch."""
    tables = {
        "item": jax_tt.dense_table(16, 4, optimizer=RULE, takes_slots=True),
        "plain": jax_tt.dense_table(16, 4, optimizer=RULE),
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    tiers = jax_tt.nnx.LayerTiers(embed, {"item": jax_tt.Tier(host_rows=99)}, depth=0)
    ids, keys = np.arange(8)[:, None], ("item", "plain")
    batch = dict.fromkeys(keys, ids)
    for staged in tiers.prefetch([batch]):
        assert embed(staged.batch)["item"].shape == (8, 4)
    keyed = jax_tt.KeyedBags.from_lengths(keys, np.arange(16), np.ones(16, np.int64))
    flat = jax_tt.Bags(np.arange(8), np.arange(9))
    slots, item, plain = staged.batch["item"], embed.tables["item"], embed.tables["plain"]
    alone, other = jax_tt.dense_table(16, 4, takes_slots=True), jax_tt.dense_table(16, 4)
    state = alone.init(jax.random.key(0))
    for call in (
        lambda: embed(batch),
        lambda: nnx.jit(lambda embed, batch: embed(batch))(embed, batch),
        lambda: embed({"item": flat, "plain": ids}),
        lambda: embed(keyed),
        lambda: item(ids),
        lambda: jax_tt.lookup(alone, state, ids),
        lambda: jax_tt.lookup_bags(alone, state, flat),
    ):
        with pytest.raises(TypeError, match=r"got .* for a table with tiers.*staged\.batch"):
            call()
    for call in (
        lambda: embed({"item": slots, "plain": slots}),
        lambda: plain(slots),
        lambda: jax_tt.lookup_bags(other, state, jax_tt.Bags(slots)),
    ):
        with pytest.raises(TypeError, match=r"got Slots.*expected ids"):
            call()
    for call in (
        lambda: embed.host_batch(batch),
        lambda: jax_tt.top_k(alone, state, np.zeros((1, 4), np.float32), 3),
        lambda: jax_tt.files.dump(alone, state, tmp_path / "dump"),
    ):
        with pytest.raises(TypeError, match="got a table with tiers"):
            call()
    with pytest.raises(TypeError, match=r"got a table that takes ids.*takes_slots=True"):
        jax_tt.nnx.LayerTiers(embed, {"plain": jax_tt.Tier(host_rows=99)})
    (staged,) = [
        staged for staged in tiers.prefetch([keyed]) if embed(staged.batch)["item"].shape == (8, 4)
    ]
    assert staged.batch["item"].ids == jax_tt.pipeline.Slots(staged.batch.ids[:8])
    assert (staged.batch["plain"].ids == np.arange(8, 16)).all()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_slots_are_made_of_repaired_offsets(keyed, on_device):
    """The lookup repairs them as well, and would read slots of other ids."""
    table = jax_tt.dense_table(16, 4, optimizer=RULE, takes_slots=True)
    features = {name: jax_tt.Feature("item") for name in ("a", "b")}
    embed = jax_tt.EmbedCollection({"item": table}, features, rngs=nnx.Rngs(0))
    embed.tables["item"].bounds = "zero"
    tiers = jax_tt.nnx.LayerTiers(embed, {"item": jax_tt.Tier(host_rows=99)}, depth=0)
    ids, offsets = np.arange(101, 105), np.array([2, 3, 2], np.int32)
    given = jax.numpy.asarray(offsets) if on_device else offsets
    batch = {"a": jax_tt.Bags(ids, given), "b": np.full((2, 1), 100)}
    if keyed:
        batch = jax_tt.KeyedBags(ids, given, keys=("a", "b"))
    for _ in tiers.prefetch([{"a": np.arange(100, 106)[None], "b": np.array([[100]])}]):
        want = tiers.read("item", ids)
    for staged in tiers.prefetch([batch]):
        rows = embed(staged.batch)
    if keyed:
        np.testing.assert_allclose(rows["a"], want[:3].sum(0)[None], rtol=1e-6)
        assert not rows["b"].any()
    else:
        np.testing.assert_allclose(rows["a"], [want[:3].sum(0), np.zeros(4)], rtol=1e-6)
    embed.tables["item"].bounds = "error"
    with pytest.raises(ValueError, match=r"offsets\[0\] is 2, expected 0"):
        next(tiers.prefetch([batch]))


def test_slots_of_hash_tables_are_no_keys():
    table, keys = jax_tt.hash_table(16, 4, ways=4), np.array([3, 2**40, 3])
    inserted, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)
    assert inserted.found.shape == (3,) and (inserted.found.numbers[:2] >= 0).all()
    for slots in (inserted.found, inserted.slots):
        for call in (jax_tt.lookup, jax_tt.dynamic.insert, jax_tt.dynamic.remove):
            with pytest.raises(TypeError, match=r"got Slots.*expected ids"):
                call(table, state, slots)

"""Training through a row cache on a stream of ids as they come: real ones where they lie beside the checkout."""

import dataclasses
import lzma
import os
from functools import cache as cached
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import RowCache, optimizers
from tests.conftest import method_fixture
from tests.helpers import fused
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_model import Model, Sizes, compare

# Hundreds of steps: not for the emulator, and the reference takes long to compile.
method = method_fixture("native")

VIDEO = Path(os.environ.get("JAX_TT_DATA", "../shared/data")) / "video.txt.xz"
FEATURES, RANK, BAGS, LENGTH = 16, 8, 64, 8


@cached
def stream() -> tuple[np.ndarray, int]:
    """Ids in the order of time, and the number of rows."""
    if VIDEO.exists():
        with lzma.open(VIDEO, "rt") as file:
            ids = np.array([int(line.split()[1]) for line in file], np.int32)
        return ids, int(ids.max()) + 1
    rng = np.random.default_rng(0)
    rows, count = 20_000, 200_000
    popular = np.minimum(rng.zipf(1.2, count), rows) - 1
    fleeting = (np.arange(count) // 40 + rng.integers(0, 2000, count)) % rows
    ids = np.where(rng.random(count) < 0.3, popular, fleeting)
    return rng.permutation(rows).astype(np.int32)[ids], rows


def batches(steps: int) -> jax.Array:
    ids, _ = stream()
    return jnp.asarray(ids[: steps * BAGS * LENGTH].reshape(steps, BAGS, LENGTH))


def shape() -> jax_tt.TTShape:
    return jax_tt.TTShape.suggest(stream()[1], FEATURES, ranks=RANK)


def loss_of(out, ids):
    """A target that each bag's ids decide, so that there is something to learn."""
    wanted = jnp.sin(jnp.sum(ids, 1, dtype=jnp.int32).astype(jnp.float32))
    return jnp.mean((jnp.sum(out, 1) - wanted) ** 2)


@dataclasses.dataclass(frozen=True)
class Training:
    """What decides a step."""

    cache: RowCache | None
    rule: optimizers.Optimizer
    method: str

    @property
    def options(self):
        return {"num_embeddings": stream()[1], "method": self.method, "optimizer": self.rule}

    def init(self):
        """A fused table, behind the cache where there is one."""
        cores = jax_tt.tt.init(jax.random.key(0), shape(), "normal")
        table = fused(cores, self.rule)[1]
        if self.cache is None:
            return table
        rows = stream()[1]
        return cache_parts.init_parts(table, self.cache, num_embeddings=rows, optimizer=self.rule)

    def step(self, table, ids):
        """One training step and, where it is due, a refresh."""
        if self.cache is None:
            plain = jax_tt.tables.TTTable.of_shape(shape(), update=jax_tt.Update(self.rule))

            def loss_of_cores(cores):
                return loss_of(jax_tt.lookup_bags(plain, cores, ids, method=self.method)[0], ids)

            return jax.grad(loss_of_cores)(table)

        def loss(parameters, rows):
            own = table._replace(table=parameters, rows=rows)
            out, directory = cache_parts.embed_bag(own, ids, self.cache, **self.options)
            return loss_of(out, ids), directory

        # Copies have no gradient and no fused state.
        argnums = (0, 1) if self.cache.gradients == "rows" else (0,)
        new, directory = jax.grad(loss, argnums, has_aux=True)(table.table, table.rows)
        values, rows = (*new, table.rows)[:2]
        table = cache_parts.Parts(values, rows, directory)
        return cache_parts.refresh(table, self.cache, **self.options)

    def run(self, state, ids, watch=lambda table: None):
        """The state after all batches, and what ``watch`` saw after each."""

        def body(state, ids):
            state = self.step(state, ids)
            return state, watch(state)

        return jax.jit(lambda state, ids: jax.lax.scan(body, state, ids))(state, ids)


def test_copies_refreshed_every_step_train_as_no_cache_does(method):
    """The directory after all steps is that of the dict model; hits are recounted from ids and tags alone."""
    steps, rows = 150, stream()[1]
    rule = optimizers.Adagrad(0.1, initial_accumulator_value=0.1)
    slots = rows // 100
    cache = RowCache(slots, counters=16 * slots, refresh_every=1, gradients="cores")
    sets, ways, buckets, room = cache.layout(rows)
    ids = batches(steps)
    plain, copies = Training(None, rule, method), Training(cache, rule, method)
    begun = plain.init()
    want, _ = plain.run(begun, ids)
    table, tags = copies.run(copies.init(), ids, lambda table: table.directory.tags)
    assert table.table["step"] == steps == want["step"]
    cores, begun = ([of[f"core_{k}"] for k in range(3)] for of in (want, begun))
    for got, core, first in zip(table.cores, cores, begun, strict=True):
        assert np.abs(core - first).max() > 1e-2  # it learned
        np.testing.assert_allclose(got, core, rtol=1e-5, atol=1e-5)

    figures, ids = table.directory.statistics(), np.asarray(ids).reshape(steps, -1)
    tags = np.concatenate([np.full((1, sets * ways), -1), np.asarray(tags).reshape(steps, -1)])
    missed = [asked[~np.isin(asked, held)] for asked, held in zip(ids, tags[:-1], strict=True)]
    changed = tags[1:] != tags[:-1]
    recount = {
        "requested": ids.size,
        "unique": sum(len(np.unique(asked)) for asked in ids),
        "misses": sum(asked.size for asked in missed),
        "unique_misses": sum(len(np.unique(asked)) for asked in missed),
        "inserted": np.sum(changed),
        "evicted": np.sum(changed & (tags[:-1] >= 0)),
        "calls": steps,
        "refreshes": steps,
        "occupied": np.sum(tags[-1] >= 0),
    }
    assert recount == {name: figures[name] for name in recount}
    np.testing.assert_allclose(figures["hit_rate"], 1 - recount["misses"] / ids.size)
    popular = np.sort(np.bincount(ids.reshape(-1), minlength=rows))[::-1]
    ideal = popular[: sets * ways].sum() / ids.size
    assert figures["hit_rate"] > ideal - 0.03

    model = Model(Sizes(sets, ways, buckets // sets, room, rows), cache.scoring)
    for asked in ids:
        model.observe(asked.tolist())
        model.populate()
    model.check_promises()
    compare(model, table.directory)


@pytest.mark.slow
def test_rows_that_stay_keep_what_they_learned_bit_for_bit(method):
    """Over 30 populates, each beside others that come and go, with their leavings written into the cores."""
    cache = RowCache(stream()[1] // 100, write_back=jax_tt.cache.WriteBack(steps=1, iterations=4))
    training = Training(cache, optimizers.RowWiseAdagrad(0.05), method)
    after = training.init()
    step = jax.jit(training.step)
    populate = jax.jit(partial(cache_parts.populate, cache=cache, **training.options))
    through, first, moved = None, None, 0
    for t, ids in enumerate(batches(60)):
        before = after = step(after, ids)
        if t % 2 == 0:
            continue
        after = populate(before)
        old, new = (np.asarray(x.directory.tags).reshape(-1) for x in (before, after))
        stayed = (old == new) & (old >= 0)
        assert len(np.unique(new[new >= 0])) == np.sum(new >= 0)
        # No row that stays changes its slot.
        assert not np.intersect1d(old[~stayed & (old >= 0)], new[~stayed]).size
        # A step at which every row stays would show nothing.
        moved += np.sum(~stayed & (old >= 0))
        rows = np.asarray(before.values)
        np.testing.assert_array_equal(rows[stayed], np.asarray(after.values)[stayed])
        slots = jax.device_get((before.slots, after.slots))
        for a, b in zip(*slots, strict=True):
            np.testing.assert_array_equal(a[stayed], b[stayed])
            assert not np.any(b[~stayed])
        if t == 1:
            first, through = (np.asarray(after.values), new), new >= 0
        else:
            through &= stayed
    assert through.sum() > 10 and moved > 50
    assert np.abs(np.asarray(after.values) - first[0])[through].max() > 1e-2

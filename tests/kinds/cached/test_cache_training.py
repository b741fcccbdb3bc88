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
import optax
import pytest

import jax_tt
from jax_tt import RowCache, optimizers
from tests.conftest import method_fixture
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


def start(cache, rule):
    """Cores or a fused table of them, behind the cache where there is one."""
    cores = jax_tt.tt.init(jax.random.key(0), shape(), "normal")
    table = cores if rule is None else jax_tt.functional.init_fused(cores, rule)
    if cache is None:
        return table
    return cache_parts.init_parts(table, cache, num_embeddings=stream()[1], optimizer=rule)


def loss_of(out, ids):
    """A target that each bag's ids decide, so that there is something to learn."""
    wanted = jnp.sin(jnp.sum(ids, 1, dtype=jnp.int32).astype(jnp.float32))
    return jnp.mean((jnp.sum(out, 1) - wanted) ** 2)


@dataclasses.dataclass(frozen=True)
class Training:
    """What decides a step; with ``tx`` optax trains, with ``rule`` the fused op."""

    cache: RowCache | None
    tx: optax.GradientTransformation | None = None
    rule: optimizers.Optimizer | None = None
    combiner: str = "sum"
    weighted: bool = False
    method: str = "auto"

    @property
    def options(self):
        fused = {} if self.rule is None else {"optimizer": self.rule}
        return {"num_embeddings": stream()[1], "method": self.method} | fused

    def init(self):
        table = start(self.cache, self.rule)
        return table, None if self.tx is None else self.tx.init(self._parameters(table))

    def _parameters(self, table):
        return table if self.cache is None else (table.table, table.rows)

    def bags(self, ids):
        return (
            jax_tt.Bags(ids, weights=(1 + ids % 3).astype(jnp.float32) / 2)
            if self.weighted
            else ids
        )

    def step(self, state, ids):
        """One training step and, where it is due, a refresh."""
        table, opt_state = state
        cached_rows = self.cache is not None and self.cache.gradients == "rows"

        def loss(parameters, rows):
            options = self.options | {"combiner": self.combiner}
            if self.cache is None:
                op = jax_tt.tt.embed_bag if self.rule is None else jax_tt.tt.fused_embed_bag
                return loss_of(op(parameters, self.bags(ids), **options), ids), None
            own = table._replace(table=parameters, rows=rows)
            out, directory = cache_parts.embed_bag(own, self.bags(ids), self.cache, **options)
            return loss_of(out, ids), directory

        if self.cache is None:
            grads, directory = jax.grad(loss, has_aux=True)(table, None)
        else:
            # A fused table is differentiated whole; copies have no gradient and no fused state.
            argnums = (0, 1) if cached_rows or self.rule is None else (0,)
            grads, directory = jax.grad(loss, argnums, has_aux=True)(table.table, table.rows)
            if len(argnums) == 1:
                grads = (*grads, table.rows)
        if self.tx is not None:
            parameters = self._parameters(table)
            updates, opt_state = self.tx.update(grads, opt_state, parameters)
            grads = optax.apply_updates(parameters, updates)
        if self.cache is None:
            return grads, opt_state
        table = cache_parts.Parts(*grads, directory)
        return cache_parts.refresh(table, self.cache, **self.options), opt_state

    def run(self, state, ids, watch=lambda table: None):
        """The state after all batches, and what ``watch`` saw after each."""

        def body(state, ids):
            state = self.step(state, ids)
            return state, watch(state[0])

        return jax.jit(lambda state, ids: jax.lax.scan(body, state, ids))(state, ids)


WAYS_TO_TRAIN = {
    "optax adagrad, weighted mean": {
        "tx": optax.adagrad(0.3),
        "combiner": "mean",
        "weighted": True,
    },
    "fused adagrad, sum": {
        "rule": optimizers.Adagrad(0.1, initial_accumulator_value=0.1),
    },
}
STEPS = 200


@pytest.mark.slow(but="fused adagrad")
@pytest.mark.parametrize("name", WAYS_TO_TRAIN)
def test_copies_refreshed_every_step_train_as_no_cache_does(name, method):
    ways = WAYS_TO_TRAIN[name] | {"method": method}
    ids = batches(STEPS)
    cache = RowCache(stream()[1] // 100, refresh_every=1, gradients="cores")
    plain, copies = Training(None, **ways), Training(cache, **ways)
    (want, _), _ = plain.run(plain.init(), ids)
    (table, _), _ = copies.run(copies.init(), ids)
    begun = plain.init()[0]
    if "rule" in ways:
        assert table.table.step == STEPS == want.step
        want, begun = want.cores, begun.cores
    for got, core, first in zip(table.cores, want, begun, strict=True):
        assert np.abs(core - first).max() > 1e-2  # it learned
        np.testing.assert_allclose(got, core, rtol=1e-5, atol=1e-5)
    figures = table.directory.statistics()
    assert figures["refreshes"] == STEPS and figures["hit_rate"] > 0.05


@pytest.mark.slow
def test_rows_that_stay_keep_what_they_learned_bit_for_bit(method):
    """Over 50 populates, each beside others that come and go, with their leavings written into the cores."""
    cache = RowCache(stream()[1] // 100, write_back=jax_tt.cache.WriteBack(steps=1, iterations=4))
    training = Training(cache, rule=optimizers.RowWiseAdagrad(0.05), method=method)
    state = training.init()
    step = jax.jit(training.step)
    populate = jax.jit(partial(cache_parts.populate, cache=cache, **training.options))
    through, first, moved = None, None, 0
    for t, ids in enumerate(batches(100)):
        state = step(state, ids)
        if t % 2 == 0:
            continue
        before, after = state[0], populate(state[0])
        state = (after, state[1])
        old, new = (np.asarray(x.directory.tags).reshape(-1) for x in (before, after))
        stayed = (old == new) & (old >= 0)
        assert len(np.unique(new[new >= 0])) == np.sum(new >= 0)
        # No row that stays changes its slot.
        assert not np.intersect1d(old[~stayed & (old >= 0)], new[~stayed]).size
        # A step at which every row stays would show nothing.
        moved += np.sum(~stayed & (old >= 0))
        rows = np.asarray(before.values)
        np.testing.assert_array_equal(rows[stayed], np.asarray(after.values)[stayed])
        slots = jax.device_get((before.rows.slots[0], after.rows.slots[0]))
        for a, b in zip(*slots, strict=True):
            np.testing.assert_array_equal(a[stayed], b[stayed])
            assert not np.any(b[~stayed])
        if t == 1:
            first, through = (np.asarray(after.values), new), new >= 0
        else:
            through &= stayed
    assert through.sum() > 10 and moved > 50
    assert np.abs(np.asarray(state[0].values) - first[0])[through].max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_figures_agree_with_a_recount_of_the_ids(policy, method):
    """The directory after the whole stream is that of the dict model; hits are recounted from ids and tags alone."""
    ids, rows = stream()
    batch = BAGS * LENGTH
    ids = ids[: len(ids) // batch * batch].reshape(-1, BAGS, LENGTH)
    slots = rows // 100
    cache = RowCache(slots, policy=policy, counters=64 * slots, refresh_every=5, gradients="cores")
    sets, ways, buckets, room = cache.layout(rows)
    training = Training(cache, rule=optimizers.SGD(0.0), method=method)

    def watch(table):
        return table.directory.tags, table.directory.totals

    (table, _), (tags, _) = training.run(training.init(), jnp.asarray(ids), watch)
    figures = table.directory.statistics()
    tags = np.concatenate([np.full((1, sets * ways), -1), np.asarray(tags).reshape(len(ids), -1)])
    recount = {"requested": 0, "unique": 0, "misses": 0, "unique_misses": 0}
    for asked, held in zip(ids.reshape(len(ids), -1), tags[:-1], strict=True):
        missed = asked[~np.isin(asked, held)]
        recount["requested"] += asked.size
        recount["unique"] += len(np.unique(asked))
        recount["misses"] += missed.size
        recount["unique_misses"] += len(np.unique(missed))
    changed = tags[1:] != tags[:-1]
    recount["inserted"] = np.sum(changed)
    recount["evicted"] = np.sum(changed & (tags[:-1] >= 0))
    recount["calls"] = len(ids)
    recount["refreshes"] = len(ids) // 5
    recount["occupied"] = np.sum(tags[-1] >= 0)
    assert recount == {name: figures[name] for name in recount}
    np.testing.assert_allclose(figures["hit_rate"], 1 - recount["misses"] / recount["requested"])

    model = Model(Sizes(sets, ways, buckets // sets, room, rows), cache.scoring)
    for t, asked in enumerate(ids):
        model.observe(asked.reshape(-1).tolist())
        if (t + 1) % 5 == 0:
            model.populate()
    model.check_promises()
    compare(model, table.directory)

    popular = np.sort(np.bincount(ids.reshape(-1), minlength=rows))[::-1]
    ideal = popular[: sets * ways].sum() / ids.size
    print(f"{policy}: hit rate {figures['hit_rate']:.4f}, best static set {ideal:.4f}")
    if policy == "lfu":
        assert figures["hit_rate"] > ideal - 0.03

"""The row cache's ops against a model of plain dicts."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jax_tt._directories.cache_directory import init_directory
from jax_tt._directories.scores import Scoring, caught_up, counted, stamp
from tests.kinds.cached.cache_case import on_kernels
from tests.kinds.cached.cache_model import (
    SCORINGS,
    SIZES,
    TOP,
    Model,
    Sizes,
    Subject,
    compare,
    drive,
)

OPERATIONS = 150
LFU = SCORINGS["lfu"]
scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
# Small enough that ids meet, and sizes that the ops are compiled for anyway.
SMALL = ("one of each", "one set", "ghosts in buckets")


@scorings
@pytest.mark.parametrize("name", ["one of each", "ghosts in buckets", "odd", "short of room"])
def test_random_operations(name, scoring, method):
    done = drive(SIZES[name], scoring, method, OPERATIONS, seed=len(name))
    assert done["observe"] and done["populate"] and done["probe"]
    assert done["evicted"] or name == "one of each"  # where hardly anything is ever counted twice


def test_wide_ids(x64):
    """Of the reference, to which `test_cache_ops` holds the native ops."""
    drive(SIZES["odd"], SCORINGS["lru"], "reference", OPERATIONS, seed=1, dtype="int64")


def _machine(scoring: Scoring, method: str) -> type[RuleBasedStateMachine]:
    """The same operations, chosen and made small by hypothesis."""

    class Machine(RuleBasedStateMachine):
        @initialize(name=st.sampled_from(SMALL))
        def start(self, name):
            self.model = Model(SIZES[name], scoring)
            self.subject = Subject(SIZES[name], scoring, method)

        # Repeats and negative ids on purpose.
        @rule(
            asked=st.lists(
                st.tuples(st.integers(-1, 24), st.integers(1, 6)),
                max_size=8,
                unique_by=lambda a: a[0],
            )
        )
        def observe(self, asked):
            keys = [key for key, times in asked for _ in range(times)]
            self.model.observe(keys)
            self.subject.observe(keys)

        @rule()
        def populate(self):
            assert self.subject.populate() == self.model.populate()

        @rule(keys=st.lists(st.integers(-2, 24), max_size=8))
        def probe(self, keys):
            assert self.subject.probe(keys) == self.model.probe(keys)

        @rule()
        def reset(self):
            self.model.reset()
            self.subject.reset()

        @invariant()
        def agree(self):
            if hasattr(self, "model"):
                self.model.check_promises()
                compare(self.model, self.subject.directory)

    return Machine


@scorings
def test_chosen_operations(scoring, method):
    run_state_machine_as_test(
        _machine(scoring, method),
        settings=settings(max_examples=10, stateful_step_count=25, deadline=None),
    )


def test_lru_counts_requests_of_a_batch_up_to_a_limit(method):
    """Those of cached rows and of others; beyond 1023 they would count as later batches."""
    sizes, scoring = SIZES["odd"], SCORINGS["lru"]
    model, subject = Model(sizes, scoring), Subject(sizes, scoring, method)
    keys = np.repeat([1, 2, 3, 4], [1022, 1023, 1024, 3000]).tolist()
    for cached in (False, True):
        assert (min(model.probe(keys)) >= 0) == cached
        for one in (model, subject):
            one.observe(keys)
        compare(model, subject.directory)
        assert subject.populate() == model.populate()


@scorings
def test_a_row_of_this_step_never_leaves(scoring):
    """TBE's rule, of the model: a row asked for in the step of a populate is still there after it."""
    sizes = SIZES["odd"]
    model = Model(sizes, scoring)
    rng = np.random.default_rng(0)
    for _ in range(60):
        keys = rng.integers(0, sizes.ids, 48).tolist()
        model.observe(keys)
        before = dict(zip(keys, model.probe(keys), strict=True))
        model.populate()
        after = dict(zip(keys, model.probe(keys), strict=True))
        assert all(after[key] == slot for key, slot in before.items() if slot >= 0)


def test_lfu_counts_every_request_while_there_is_room():
    """With a counter for every id no count is ever lost, wherever the id has been meanwhile."""
    sizes = Sizes(2, 4, 4, 32, 60)
    model = Model(sizes, LFU)
    rng = np.random.default_rng(2)
    for step in range(80):
        keys = ((sizes.ids ** rng.random(48)).astype(int) - 1 + step // 8) % sizes.ids
        model.observe(keys.tolist())
        model.populate()
    ghosts = [bucket for of_set in model.ghosts for bucket in of_set]
    counted = {row: count.score for held in (model.rows, *ghosts) for row, count in held.items()}
    assert counted == dict(model.requests)


def test_requests_age_over_the_longest_half_lives():
    """`counted` stops at the largest int32, before five such half-lives have passed."""
    half_life, start = 10**9, 2**24
    scoring, batch = Scoring("lfu", half_life), half_life // 2
    directory = init_directory(1, 1, 1, 1, np.int32)._replace(scores=np.full((1, 1), start))
    passed = 0
    while passed < 6 * half_life:
        directory = counted(caught_up(directory, scoring), np.int32(batch))
        passed += batch
        # Of now: what a request of the start is worth beside one of this batch.
        ended, begun = divmod(passed, half_life)
        found = int(directory.scores[0, 0]) / int(stamp(directory, scoring))
        expected = start / 1024 / (1 + begun / half_life) / 2**ended
        np.testing.assert_allclose(found, expected, rtol=2e-3)


@on_kernels
def test_a_row_that_left_is_never_cached_twice(method):
    """Slots that are hot in the step of a populate let a row leave that is hotter than they are."""
    sizes = Sizes(1, 3, 2, 4, 40)
    model, subject = Model(sizes, LFU), Subject(sizes, LFU, method)
    near = [row for row in range(sizes.ids) if model.home(row)[1] == 0]
    far = next(row for row in range(sizes.ids) if model.home(row)[1] == 1)
    first, *others = near[:3]
    for asked, populate in (
        ([first] * 5 + others, True),
        ([far] * 6 + others, True),
        ([first] * 3, False),
        ([far], True),
    ):
        model.observe(asked)
        subject.observe(asked)
        if populate:
            assert subject.populate() == model.populate()
        compare(model, subject.directory)
    assert model.rows[first].score == 8


@on_kernels
def test_counts_stop_at_the_end_of_their_range(method):
    sizes = SIZES["one set"]
    model, subject = Model(sizes, LFU), Subject(sizes, LFU, method)
    for _ in range(4):
        for one in (model, subject):
            one.observe([0] * 4 + [5] * 4)
            one.populate()
            one.heat(5, 0)
            one.observe([0] * 48)
        compare(model, subject.directory)
    assert model.rows[0].score == TOP


@on_kernels
def test_the_age_of_a_request_counts_however_long_nothing_was_populated(method):
    """The exact sum of what requests are worth by now, with every half-life halving them, over forty half-lives."""
    sizes, half_life = SIZES["one set"], 64
    subject = Subject(sizes, Scoring("lfu", half_life), method)
    span = half_life * sizes.ways
    rng = np.random.default_rng(0)
    asked, exact = 0, np.zeros(3)
    while asked < 40 * span:
        counts = rng.multinomial(48, [0.5, 0.3, 0.2] if asked // span % 2 else [0.1, 0.3, 0.6])
        subject.observe(np.repeat(np.arange(3), counts).tolist())
        # A straight line between powers of two, as scores have it.
        worth = (1 + asked % span / span) * 2.0 ** (asked // span)
        exact, asked = exact + counts * worth, asked + 48
        tags, scores = (np.asarray(x)[0] for x in subject.directory[3:5])
        found = np.array([scores[tags == row][0] for row in range(3)], float)
        np.testing.assert_allclose(found / found.sum(), exact / exact.sum(), atol=2e-3)

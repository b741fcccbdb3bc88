"""Two functions of every batch, each in a thread of its own."""

import itertools
import threading

import pytest

from jax_tt._tiers.pipeline import Pipeline


def squares(batches, depth):
    pipeline = Pipeline(batches, lambda k: k + 1, lambda k: k * k, depth)
    pipeline.start()
    yield from iter(pipeline.next, None)
    pipeline.stop()


def test_results_are_in_order():
    for depth in (0, 1, 3):
        assert list(squares(range(50), depth)) == [k * k for k in range(1, 51)]
        assert list(squares([], depth)) == []


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("fails", ["batches", "first", "second"])
def test_errors_come_after_the_results_before_them(depth, fails):
    def step(name):
        def call(k):
            if name == fails and k == 5:
                raise KeyError(name)
            return k

        return call

    pipeline = Pipeline(map(step("batches"), range(9)), step("first"), step("second"), depth)
    pipeline.start()
    assert [pipeline.next() for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match=fails):
        pipeline.next()
    pipeline.stop()


def test_few_batches_are_asked_for_ahead():
    depth = 3
    asked, enough = [], threading.Event()

    def batches():
        for k in itertools.count():
            asked.append(k)
            if k == depth + 2:
                enough.set()
            yield k

    pipeline = Pipeline(batches(), lambda k: k, lambda k: k, depth)
    pipeline.start()
    assert enough.wait(10)
    pipeline.stop()
    assert (
        len(asked) <= depth + 5
    )  # what is in a queue or in a step, and one more while threads end


def test_stop_ends_threads_that_wait():
    begun, go = threading.Event(), threading.Event()

    def batches():
        yield 0
        begun.set()
        go.wait(10)
        yield 1

    pipeline = Pipeline(batches(), lambda k: k, lambda k: k, 2)
    pipeline.start()
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    before = threading.active_count()
    pipeline.stop()
    assert threading.active_count() < before

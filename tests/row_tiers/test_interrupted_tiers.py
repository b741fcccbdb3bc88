"""Tiers after errors and interrupts: no row is wrong, and what cannot be used any more says so."""

import signal
import threading

import numpy as np
import pytest

import jax_tt
from jax_tt._tiers.host import HostStore
from jax_tt._tiers.pipeline import Pipeline
from jax_tt._tiers.row_bytes import RecordLayout
from jax_tt._tiers.table import TieredRows
from tests.row_tiers.test_row_tiers import batch_of, small_tiers, trained

IDS = np.arange(48)


def drawn_batches(count):
    draw = np.random.default_rng(0)
    return [batch_of(draw.choice(IDS, 6)) for _ in range(count)]


def interrupted_once(monkeypatch, owner, name):
    """The first call of a method ends with a KeyboardInterrupt before it does anything."""
    method = getattr(owner, name)

    def call(*args):
        monkeypatch.setattr(owner, name, method)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("owner", [Pipeline, TieredRows])
def test_an_end_that_was_interrupted_is_completed(monkeypatch, owner):
    batches = drawn_batches(30)
    (tiers, state), (others, whole) = small_tiers(depth=2), small_tiers(depth=0)
    iteration = tiers.prefetch(batches)
    state = tiers.load(state, next(iteration))
    interrupted_once(monkeypatch, owner, "stop" if owner is Pipeline else "forget_staged")
    with pytest.raises(KeyboardInterrupt):
        iteration.close()
    state = trained(tiers, state, batches)
    whole = trained(others, whole, batches)
    assert (tiers.read(state, "item", IDS) == others.read(whole, "item", IDS)).all()


def test_an_interrupted_start_leaves_no_thread(monkeypatch):
    batches, before = drawn_batches(30), threading.active_count()
    (tiers, state), (others, whole) = small_tiers(depth=2), small_tiers(depth=0)
    start = threading.Thread.start

    def first_only(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        start(thread)
        interrupted_once(monkeypatch, threading.Thread, "start")

    monkeypatch.setattr(threading.Thread, "start", first_only)
    with pytest.raises(KeyboardInterrupt):
        next(tiers.prefetch(batches))
    assert threading.active_count() == before
    state, whole = trained(tiers, state, batches), trained(others, whole, batches)
    assert (tiers.read(state, "item", IDS) == others.read(whole, "item", IDS)).all()


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also where the shell lets background jobs ignore it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread gets interrupts")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_batch_is_waited_for():
    batches, come = drawn_batches(30), threading.Event()

    def slow():
        yield from batches[:3]
        come.wait(20)

    (tiers, state), (others, whole) = small_tiers(depth=2), small_tiers(depth=0)
    main = threading.main_thread().ident

    def interrupt():
        signal.pthread_kill(main, signal.SIGINT)
        come.set()

    with pytest.raises(KeyboardInterrupt):
        for staged in tiers.prefetch(slow()):
            state = tiers.load(state, staged)
            if staged.number == 2:
                threading.Timer(0.2, interrupt).start()
    for staged in others.prefetch(batches[:3]):
        whole = others.load(whole, staged)
    state, whole = trained(tiers, state, batches), trained(others, whole, batches)
    assert (tiers.read(state, "item", IDS) == others.read(whole, "item", IDS)).all()


def test_rows_are_not_read_after_an_interrupted_change(tmp_path, monkeypatch):
    tiers, state = small_tiers(tmp_path)
    state = trained(tiers, state, drawn_batches(20))
    tiers.save(state, b"first")
    before = tiers.read(state, "item", IDS)
    state = trained(tiers, state, drawn_batches(5))
    interrupted_once(monkeypatch, RecordLayout, "pack")
    with pytest.raises(KeyboardInterrupt):
        tiers.save(state, b"second")
    for call in (lambda: tiers.read(state, "item", IDS), lambda: tiers.save(state)):
        with pytest.raises(jax_tt.files.StoreError, match=r"KeyboardInterrupt.*[Oo]pen"):
            call()
    tiers.close()
    tiers, state = small_tiers(tmp_path)
    other, state = tiers.restore(state)
    assert other == b"first"
    assert (tiers.read(state, "item", IDS) == before).all()
    tiers.close()


def test_close_ends_threads():
    before = threading.active_count()
    tiers, state = small_tiers(depth=2)
    iteration = tiers.prefetch(drawn_batches(50))
    state = tiers.load(state, next(iteration))
    assert threading.active_count() > before
    tiers.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="prefetch: the tiers were closed"):
        next(iteration)


def test_the_end_of_an_old_iteration_leaves_a_new_one_alone():
    batches = drawn_batches(10)
    tiers, state = small_tiers(depth=2)
    old = tiers.prefetch(batches)
    state = tiers.load(state, next(old))
    tiers.close()
    new = tiers.prefetch(batches)
    state = tiers.load(state, next(new))
    old.close()
    for staged in new:
        state = tiers.load(state, staged)
    assert tiers.statistics()["item"].requests == 11 * 12


def test_tiers_that_cannot_be_made_leave_the_directory_free(tmp_path, monkeypatch):
    def refused(*args):
        raise MemoryError("no memory for the rows")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(HostStore, "__init__", refused)
        small_tiers(tmp_path)
    small_tiers(tmp_path)[0].close()

"""The keys that have room are those of a model that admits them one by one."""

import numpy as np
import pytest

from jax_tt._directories import matching
from jax_tt._directories.matching import Keys, most_valuable
from tests.kinds.hashed.hash_model import with_room


def check(keys, sets, ways):
    found = most_valuable(keys, sets, ways)
    pairs = list(zip(keys.home.tolist(), keys.other.tolist(), strict=True))
    kept = np.flatnonzero(found >= 0)
    assert set(kept.tolist()) == with_room(range(len(pairs)), pairs.__getitem__, ways)
    assert ((found == keys.home) | (found == keys.other))[kept].all()
    assert (np.bincount(found[kept], minlength=sets) <= ways).all()


@pytest.mark.parametrize("kind", ["any sets", "near ones", "near ones, in their order"])
def test_keys_are_those_of_a_model_that_admits_them_one_by_one(kind):
    """Of few sets that keys connect in all ways, and of chains of sets, where one key makes many others move."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        sets, ways = int(draw.integers(1, 14)), int(draw.integers(1, 4))
        count = int(draw.integers(1, 2.2 * sets * ways + 2))
        home, other = draw.integers(0, sets, (2, count))
        if kind != "any sets":
            other = np.minimum(home + draw.integers(0, 3, count), sets - 1)
        if kind == "near ones, in their order":
            order = np.argsort(home if draw.random() < 0.5 else -home, kind="stable")
            home, other = home[order], other[order]
        check(Keys(home, other, draw.random(count) < 0.3), sets, ways)


@pytest.mark.parametrize("load", [0.97, 1.0, 1.05, 3.0])
def test_few_flows_find_them_in_large_tables(monkeypatch, load):
    flows, flow = [], matching.balanced
    monkeypatch.setattr(matching, "balanced", lambda *keys: flows.append(keys) or flow(*keys))
    draw = np.random.default_rng(1)
    home, other = draw.integers(0, 512, (2, int(load * 4096)))
    check(Keys(home, other, np.zeros(home.size, bool)), 512, 8)
    assert len(flows) <= 12

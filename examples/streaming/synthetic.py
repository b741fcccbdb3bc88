"""A synthetic stream of clicks on a vocabulary that drifts, with a planted click probability.

Ids are random 64-bit numbers, and nothing of the size of the vocabulary is stored: a batch is a pure function of (seed,
step). There are `places` that items are shown at, and `places` that users come from. The k-th place is drawn in
proportion to k ** -zipf, and who is there depends on the time:

* an item is at its place for 0.5 to 1.5 times `item_life` steps; then it is never seen again, and another item takes
  its place, about which nothing is known;
* `turns` users take turns at a place, each for `session` steps; after `returns` sessions they are gone for good, and
  `turns` others follow. So most users that are away come back.

The planted log-odds of a click are

    BIAS + effect(user) + effect(item) + <vector(user), vector(item)>

where effects and vectors are normal numbers that are computed from the id.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from examples.dlrm.data_synthetic import hashed_bits, hashed_normal

LATENT = 4  # length of the planted vectors
BIAS = -0.5
# Salts of the hashes. Those of the vectors follow that of the effect.
_LIFE, _PHASE, _ITEM, _USER, _EFFECT = 0, 1, 2, 3, 4


class Clicks(NamedTuple):
    """Items that were shown to users.

    Attributes:
        ids: uint64 [B] of the features "user" and "item".
        labels: float32 [B], 1 for a click.
        best: float [B], the planted log-odds of a click, whose AUC is the best there is.
    """

    ids: dict[str, np.ndarray]
    labels: np.ndarray
    best: np.ndarray


@dataclass(frozen=True)
class DriftingClicks:
    """The planted stream.

    Args:
        steps, batch_size: number of batches, and of examples of each.
        seed: of the draws and of the planted numbers.
        places: of items, and of users.
        zipf: exponent of the popularity of places, not 1.
        item_life, session, turns, returns: how ids come and go, as above.
    """

    steps: int
    batch_size: int
    seed: int = 0
    places: int = 4096
    zipf: float = 0.9
    item_life: int = 800
    session: int = 200
    turns: int = 4
    returns: int = 2

    def batches(self) -> Iterator[Clicks]:
        return map(self.batch, range(self.steps))

    def batch(self, step: int) -> Clicks:
        """The batch of one step."""
        draw = np.random.default_rng([self.seed, step])
        users = self._users(self._places(draw), step)
        items = self._items(self._places(draw), step)
        best = self._log_odds(users, items)
        labels = draw.random(self.batch_size) < 1 / (1 + np.exp(-best))
        return Clicks({"user": users, "item": items}, labels.astype(np.float32), best)

    def _places(self, draw: np.random.Generator) -> np.ndarray:
        """Places uint64 [B]."""
        # Inverse of the distribution function of the continuous power law on [1, places + 1).
        exponent = 1 - self.zipf
        most = (self.places + 1) ** exponent - 1
        place = (1 + draw.random(self.batch_size) * most) ** (1 / exponent)
        return np.minimum(place.astype(np.uint64), np.uint64(self.places)) - np.uint64(1)

    def _items(self, places: np.ndarray, step: int) -> np.ndarray:
        life = self.item_life * (0.5 + self._uniform(places, _LIFE))
        generation = np.floor(step / life + self._uniform(places, _PHASE))
        return self._id(_ITEM, places, generation)

    def _users(self, places: np.ndarray, step: int) -> np.ndarray:
        cycle = self.turns * self.returns
        # Places change at different times, and are at different points of the cycle.
        session = np.floor(step / self.session + cycle * self._uniform(places, _PHASE))
        return self._id(_USER, places, session % self.turns, session // cycle)

    def _id(self, kind: int, *parts: np.ndarray) -> np.ndarray:
        found = np.full(len(parts[0]), self.seed, np.uint64)
        for part in parts:
            found = hashed_bits(found ^ hashed_bits(part, kind), kind)
        return found

    def _uniform(self, places: np.ndarray, salt: int) -> np.ndarray:
        return hashed_bits(places, salt) / 2.0**64

    def _log_odds(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        effects = hashed_normal(users, _EFFECT) + hashed_normal(items, _EFFECT)
        pairs = sum(
            hashed_normal(users, salt) * hashed_normal(items, salt)
            for salt in range(_EFFECT + 1, _EFFECT + 1 + LATENT)
        )
        return BIAS + effects + pairs / math.sqrt(LATENT)

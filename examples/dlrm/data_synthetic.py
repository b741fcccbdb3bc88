"""A synthetic click log: tables of any size, power-law popularity, a planted click probability.

Nothing of the size of a table is ever stored: the popularity, the group and the individual effect of an
id are computed from the id itself, so a table of 10 million rows costs as much as a table of 100. A
batch is a pure function of (seed, step), so that a resumed run sees exactly the same data as an
uninterrupted one.

The planted log-odds of a click are

    bias + <w, dense> + sum_t a_t[group(id_t)] + sum_t b_t(id_t)
         + sum_{s<t} <u_s[group(id_s)], u_t[group(id_t)]>

with random a, u per group and b per id. If an example has h ids in a table, their a, b and u are summed
and divided by sqrt(h), which keeps the variance of one id. Groups are ranges of neighbouring ids ("clustered", as if
ids were assigned along a catalogue) or scattered by a hash ("random"). A dense table cannot tell
the two kinds apart. A TT table can, because rows whose ids share digits share parameters.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from examples.dlrm.batch import NUM_DENSE, Batch, Position

LATENT = 4  # length of the planted group vectors u
# Standard deviation that each part contributes to the log-odds.
SCALE_DENSE, SCALE_GROUP, SCALE_ID, SCALE_PAIR = 0.6, 0.9, 0.3, 1.2
BIAS = -1.0
# Evaluation batches are drawn from steps that training never reaches.
EVALUATION_STEP = 1 << 40


@dataclass(frozen=True)
class SyntheticClicks:
    """The planted click log.

    Args:
      table_sizes: rows of each table.
      batch_size: examples a step.
      evaluation_examples: size of the held-out set, rounded up to whole batches.
      seed: of the planted parameters and of the draws.
      zipf: exponent of the popularity; the k-th most popular id is drawn in proportion to k **
        -zipf.
      groups: number of groups in each table (at most its rows).
      id_order: "clustered" or "random".
      multi_hot: ids that an example has in each table, drawn independently; default one.
    """

    table_sizes: tuple[int, ...]
    batch_size: int
    evaluation_examples: int
    seed: int = 0
    zipf: float = 1.1
    groups: int = 64
    id_order: str = "clustered"
    multi_hot: tuple[int, ...] = ()
    start: Position = (0,)
    _planted: "_Planted" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.id_order not in ("clustered", "random"):
            raise ValueError(f"id_order: got {self.id_order!r}, expected 'clustered' or 'random'")
        if self.zipf <= 0 or self.zipf == 1.0:
            raise ValueError(
                f"zipf: got {self.zipf}, expected a positive exponent, not exactly 1; take 1.001"
            )
        if self.multi_hot and len(self.multi_hot) != len(self.table_sizes):
            raise ValueError(
                f"multi_hot: got {len(self.multi_hot)} numbers, expected one for each of the "
                f"{len(self.table_sizes)} tables"
            )
        planted = _plant(np.random.default_rng([self.seed, 0]), len(self.table_sizes), self.groups)
        object.__setattr__(self, "_planted", planted)

    def stream(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Endless; the position is the step."""
        (step,) = position
        while True:
            yield self.batch(step), (step + 1,)
            step += 1

    def evaluation(self, position: Position) -> Iterator[Batch]:
        """Always the same held-out examples."""
        del position
        yield from self._held_out

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        rng = np.random.default_rng([self.seed, 1, step])
        dense = rng.standard_normal((self.batch_size, NUM_DENSE), dtype=np.float32)
        columns = [
            self._draw_ids(rng, size)
            for size, hot in zip(self.table_sizes, self._hot, strict=True)
            for _ in range(hot)
        ]
        ids = np.stack(columns, axis=1)
        uniform = rng.random(self.batch_size)
        label = uniform < 1.0 / (1.0 + np.exp(-self._log_odds(dense, ids)))
        return Batch(dense, ids, label.astype(np.float32))

    def best_scores(self, batch: Batch) -> np.ndarray:
        """The planted log-odds: ranking by them gives the best AUC there is."""
        return self._log_odds(batch.dense, batch.ids)

    @functools.cached_property
    def _held_out(self) -> list[Batch]:
        batches = math.ceil(self.evaluation_examples / self.batch_size)
        return [self.batch(EVALUATION_STEP + i) for i in range(batches)]

    @property
    def _hot(self) -> tuple[int, ...]:
        return self.multi_hot or (1,) * len(self.table_sizes)

    def _draw_ids(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Ids [B] drawn by the power law; popular ids lie scattered all over the table."""
        # Inverse of the distribution function of the continuous power law on [1, size + 1).
        exponent = 1.0 - self.zipf
        rank = (1.0 + rng.random(self.batch_size) * ((size + 1.0) ** exponent - 1.0)) ** (
            1.0 / exponent
        )
        rank = np.minimum(rank.astype(np.int64), size) - 1
        # rank -> id is a bijection, since stride and size have no common factor.
        stride = int(size * 0.6180339887) | 1
        while math.gcd(stride, size) != 1:
            stride += 2
        return (rank * stride % size).astype(np.int32)

    def _group(self, ids: np.ndarray, table: int) -> np.ndarray:
        size = self.table_sizes[table]
        groups = min(self.groups, size)
        if self.id_order == "clustered":
            return ids.astype(np.int64) * groups // size
        return hashed_bits(ids, 2 * table) % np.uint64(groups)

    def _log_odds(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        p = self._planted
        logit = BIAS + dense @ p.dense
        total = np.zeros((len(ids), LATENT))
        square = np.zeros(len(ids))
        first = 0
        for t, hot in enumerate(self._hot):
            own = ids[:, first : first + hot]  # [B, hot]
            first += hot
            group = self._group(own, t)
            vector = p.vector[t, group].sum(1) / math.sqrt(hot)
            effect = p.group[t, group] + p.id_scale * hashed_normal(own, 2 * t + 1)
            logit = logit + effect.sum(1) / math.sqrt(hot)
            total += vector
            square += np.sum(vector**2, axis=1)
        # sum over pairs s < t of <u_s, u_t>
        return logit + p.pair_scale * 0.5 * (np.sum(total**2, axis=1) - square)


@dataclass(frozen=True)
class _Planted:
    """Parameters of the planted click probability."""

    dense: np.ndarray  # [NUM_DENSE]
    group: np.ndarray  # [T, groups]
    vector: np.ndarray  # [T, groups, LATENT]
    id_scale: float
    pair_scale: float


def _plant(rng: np.random.Generator, tables: int, groups: int) -> _Planted:
    pairs = max(1, tables * (tables - 1) // 2)
    return _Planted(
        dense=rng.standard_normal(NUM_DENSE) * SCALE_DENSE / math.sqrt(NUM_DENSE),
        group=rng.standard_normal((tables, groups)) * SCALE_GROUP / math.sqrt(tables),
        vector=rng.standard_normal((tables, groups, LATENT)),
        id_scale=SCALE_ID / math.sqrt(tables),
        pair_scale=SCALE_PAIR / math.sqrt(pairs * LATENT),
    )


def hashed_bits(ids: np.ndarray, salt: int) -> np.ndarray:
    """64 well-mixed bits of each id (the finaliser of splitmix64). uint64, the shape of ids."""
    x = ids.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed_normal(ids: np.ndarray, salt: int) -> np.ndarray:
    """A standard normal number that belongs to each id (Box-Muller on its hashed bits)."""
    bits = hashed_bits(ids, salt)
    u = ((bits >> np.uint64(32)).astype(np.float64) + 1.0) / 2.0**32
    v = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2.0**32
    return np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)

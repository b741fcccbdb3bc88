"""Streams of ids for the benchmarks: uniform, and Zipf over shuffled ids."""

import functools

import numpy as np

ZIPF_EXPONENT = 1.05


def uniform_ids(rng: np.random.Generator, num_embeddings: int, count: int) -> np.ndarray:
    """``count`` int64 ids, each row of the table as likely as any other."""
    return rng.integers(0, num_embeddings, count)


def zipf_ids(rng: np.random.Generator, num_embeddings: int, count: int) -> np.ndarray:
    """``count`` int64 ids whose popularity falls as ``rank ** -ZIPF_EXPONENT``.

    Ranks come from the inverse of the continuous distribution on ``[1, num_embeddings]``. Which id
    has which rank is random, as in data whose ids carry no order: popular ids share no digits.
    """
    power = 1.0 - ZIPF_EXPONENT
    rank = ((float(num_embeddings) ** power - 1.0) * rng.random(count) + 1.0) ** (1.0 / power)
    rank = np.clip(rank.astype(np.int64) - 1, 0, num_embeddings - 1)
    return _ids_by_popularity(num_embeddings)[rank]


@functools.cache
def _ids_by_popularity(num_embeddings: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(num_embeddings)


STREAMS = {"uniform": uniform_ids, "zipf": zipf_ids}


def batches(stream: str, num_embeddings: int, size: int, count: int = 10) -> list[np.ndarray]:
    """``count`` batches of ``size`` ids of the named stream; the same for every contender."""
    rng = np.random.default_rng(0)
    return [STREAMS[stream](rng, num_embeddings, size) for _ in range(count)]

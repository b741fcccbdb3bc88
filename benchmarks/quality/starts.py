"""The rows that tables start from, made from the train interactions alone."""

from collections.abc import Mapping

import numpy as np

import jax_tt
from examples.retrieval.data import Interactions


def make_start(
    kind: str,
    data: Interactions,
    features: int,
    std: float,
    trained: Mapping[str, np.ndarray] | None = None,
) -> Mapping[str, np.ndarray | None]:
    """Rows float32 `[num_users, features]` of "users" and `[num_items, features]` of "items", or None for each.

    Args:
        kind: "random": None, as a table starts by itself; "spectral": `jax_tt.order.spectral_rows`; others: `trained`.
        data: interactions.
        features: columns.
        std: root of the mean square of the entries, of spectral rows.
        trained: rows of another run.
    """
    if kind == "random":
        return {"users": None, "items": None}
    if kind != "spectral":
        if trained is None:
            raise ValueError(f"start: got {kind!r} without the rows of such a run.")
        return trained
    pairs = data.train_users, data.train_items
    users, items = jax_tt.order.spectral_rows(pairs, data.num_items, features)
    # Users after the last with a train interaction have none.
    users = np.pad(users, ((0, data.num_users - len(users)), (0, 0)))
    length = np.float32(std * features**0.5)
    return {"users": length * users, "items": length * items}

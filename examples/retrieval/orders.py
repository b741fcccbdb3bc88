"""The order of the ids of a TT table, made from the train interactions alone."""

import numpy as np

import jax_tt
from examples.retrieval.data import Interactions

_REFINE = {"users": 0, "items": 4}  # rounds; on held-out items, the users' were worth nothing


def make_order(
    kind: str, data: Interactions, ids: str, shape: jax_tt.TTShape, start: np.ndarray | None
) -> jax_tt.order.IdOrder | None:
    """The order of a table.

    Args:
        kind: "none": the original order; "interactions": users who took the same items, or items of the same users,
            share digits; "counts": the most frequent first; "start": ids whose rows to start from are alike do.
        ids: "users" or "items".
        shape: of the table.
        start: rows that the table starts from, for "start".
    """
    if kind == "none":
        return None
    if kind == "start":
        return jax_tt.order.from_table(start, shape, refine=_REFINE[ids])
    own, other = data.train_items, data.train_users
    if ids == "users":
        own, other = other, own
    if kind == "counts":
        return jax_tt.order.from_counts(np.bincount(own, minlength=shape.num_embeddings))
    return jax_tt.order.from_interactions((other, own), shape)

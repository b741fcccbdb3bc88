"""The order of the ids of a TT table, made from the train interactions, or from the rows that it starts from."""

import numpy as np

import jax_tt
from examples.retrieval import model
from examples.retrieval.data import Interactions

_REFINE = {"users": 0, "items": 4}  # rounds; on held-out items, the users' were worth nothing


def make_order(
    kind: str, data: Interactions, ids: str, shape: jax_tt.TTShape, start: np.ndarray | None
) -> jax_tt.order.IdOrder | None:
    """The order of a table; "start" lets ids whose rows in `start` are alike share digits, others are the example's."""
    if kind == "start":
        return jax_tt.order.from_table(start, shape, refine=_REFINE[ids])
    return model.make_order(kind, data, ids, shape)

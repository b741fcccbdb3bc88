"""The loss of the tests differentiated by hand, in float64, where FBGEMM on the CPU cannot be the judge."""

from typing import NamedTuple

import numpy as np

from tests.peers.tables import Batch, Tables, goal


class Step(NamedTuple):
    """What one step needs.

    Attributes:
        rows: the results of all features.
        gradients: of all tables, summed over all occurrences of a row.
        weights: the gradient of the weights.
    """

    rows: list[np.ndarray]
    gradients: list[np.ndarray]
    weights: np.ndarray


def by_hand(tables: Tables, values: list[np.ndarray], batch: Batch) -> Step:
    """The results of sums, or of ``"mean_count"``, and their gradients."""
    weights = np.ones(len(batch.ids)) if batch.weights is None else batch.weights.astype(np.float64)
    gradients = [np.zeros(value.shape) for value in values]
    of_weights, bag, results = np.zeros(len(weights)), 0, []
    for feature, (table, size) in enumerate(zip(tables.of_features, batch.sizes, strict=True)):
        rows = np.zeros((size, values[table].shape[1]))
        for sample in range(size):
            here = slice(batch.offsets[bag], batch.offsets[bag + 1])
            ids, bag = batch.ids[here], bag + 1
            divisor = max(len(ids), 1) if tables.combiner == "mean_count" else 1
            shares, own = weights[here] / divisor, values[table][ids].astype(np.float64)
            rows[sample] = shares @ own
            slope = rows[sample] - goal(feature)
            np.add.at(gradients[table], ids, np.outer(shares, slope))
            of_weights[here] = own @ slope / divisor
        results.append(rows)
    return Step(results, gradients, of_weights)

"""The area under the ROC curve, exactly."""

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a clicked example scores above one that was not; a tie counts half.

    Args:
      scores: [n], any monotone function of the click probability.
      labels: [n], 1 = clicked, 0 = not.

    Returns:
      The AUC, or nan where one of the classes is missing or a score is not a number.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    clicked = np.asarray(labels) > 0.5
    positives, negatives = int(clicked.sum()), int((~clicked).sum())
    if positives == 0 or negatives == 0 or np.isnan(scores).any():
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Rank of a value = mean of the 1-based places that its ties take up (Mann-Whitney).
    rank = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return float((rank[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))

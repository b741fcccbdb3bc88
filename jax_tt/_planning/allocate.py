"""Divides bytes among tables such that they reduce the error most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_tt._planning.candidates import Candidate


def allocate(
    candidates: Mapping[str, Sequence[Candidate]], budget: int
) -> dict[str, Candidate] | None:
    """A candidate for every table, of at most ``budget`` bytes together, or None if even the smallest are too many.

    All tables start with their smallest candidate. Then the step along a table's lower convex hull of squared error
    over bytes that takes off most per byte is made, again and again, the steps that no longer fit left out (Shoham
    and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988).
    """
    hulls = {name: _hull(some) for name, some in candidates.items()}
    place = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].nbytes for hull in hulls.values())
    if left < 0:
        return None
    open_tables = set(hulls)
    while open_tables:
        steps = []
        for name in sorted(open_tables):
            hull, at = hulls[name], place[name]
            if at + 1 == len(hull) or hull[at + 1].nbytes - hull[at].nbytes > left:
                open_tables.discard(name)
            else:
                steps.append((_slope(hull[at], hull[at + 1]), name))
        if not steps:
            break
        _, name = min(steps)
        hull, at = hulls[name], place[name]
        left -= hull[at + 1].nbytes - hull[at].nbytes
        place[name] = at + 1
    return {name: hull[place[name]] for name, hull in hulls.items()}


def least_bytes(candidates: Mapping[str, Sequence[Candidate]]) -> int:
    return sum(min(one.nbytes for one in some) for some in candidates.values())


def _slope(small: Candidate, large: Candidate) -> float:
    """Change of the squared error per byte, below 0 on a hull."""
    return (large.error**2 - small.error**2) / (large.nbytes - small.nbytes)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates on the lower convex hull, smallest first, each with less error than the one before."""
    hull: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.nbytes, one.error)):
        if hull and one.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull

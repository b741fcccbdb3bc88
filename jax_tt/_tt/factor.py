"""Factorisations of table sizes into the row and column factors of a tensor train."""

import itertools
import math


def integer_root(value: int, degree: int) -> int:
    """Smallest integer ``x`` with ``x ** degree >= value``, exact for any size."""
    low, high = 1, 1
    while high**degree < value:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if middle**degree >= value:
            high = middle
        else:
            low = middle + 1
    return low


def balanced_cover(value: int, count: int) -> tuple[int, ...]:
    """``count`` nearly equal factors, ascending, whose product just reaches ``value``."""
    root = integer_root(value, count)
    # A small window around the root holds covers with almost no slack; the last factor closes the gap.
    # It shrinks with the root, or a small prime would be covered as 1 x 1 x 67.
    window = range(root - min(4, root // 4), root + 3)
    largest = root + root // 5 + 10  # a slightly smaller product is not worth one large core
    best: tuple[int, int, tuple[int, ...]] | None = None
    for head in itertools.combinations_with_replacement(window, count - 1):
        last = -(-value // math.prod(head))
        if last > largest:
            continue
        factors = tuple(sorted((*head, last)))
        candidate = (math.prod(factors), factors[-1] - factors[0], factors)
        if best is None or candidate < best:
            best = candidate
    assert (
        best is not None
    )  # the root itself is in the window, and then the last factor is at most the root
    return best[2]


def exact_factors(value: int, count: int) -> tuple[int, ...]:
    """``count`` factors, ascending, whose product is exactly ``value`` and whose sum is smallest."""
    divisors = _divisors(value)

    def search(rest: int, parts: int, least: int) -> tuple[int, ...] | None:
        if parts == 1:
            return (rest,) if rest >= least else None
        found: tuple[int, ...] | None = None
        for divisor in divisors:
            if divisor < least or rest % divisor or divisor**parts > rest:
                continue
            tail = search(rest // divisor, parts - 1, divisor)
            if tail is not None and (found is None or divisor + sum(tail) < sum(found)):
                found = (divisor, *tail)
        return found

    result = search(value, count, 1)
    assert result is not None  # (1, ..., 1, value) always qualifies
    return result


def _divisors(value: int) -> list[int]:
    small = [x for x in range(1, math.isqrt(value) + 1) if value % x == 0]
    return sorted({*small, *(value // x for x in small)})

"""What a malformed call must do: raise an ordinary error that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What a message must name; nothing if the call may be right by luck, and None if a mutation does not apply.
Words = tuple[str, ...] | None


def outcome(what: str, words: Words, call: Callable[[], Any]) -> str:
    """``"raised"`` where the call raised an error with these words, ``"returned"`` where it may be right by luck."""
    if words is None:
        return "returned"
    try:
        found = call()
    except (TypeError, ValueError) as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{what}: the message does not name {missing}: {str(error)[:300]}"
        return "raised"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    assert not words, f"{what}: accepted as {found}"
    return "returned"

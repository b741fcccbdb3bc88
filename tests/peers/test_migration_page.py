"""The page on FBGEMM names everything that its operator can be given."""

import inspect
import re
from pathlib import Path

import pytest

from tests.peers.tbe import SplitTableBatchedEmbeddingBagsCodegen

PAGE = Path(__file__).parents[2] / "docs" / "migration" / "fbgemm.md"


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_every_argument_has_a_row(method):
    function = getattr(SplitTableBatchedEmbeddingBagsCodegen, method)
    arguments = set(inspect.signature(function).parameters) - {"self"}
    rows = re.findall(r"^\|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(arguments) >= 10
    assert not arguments - named

"""Summaries of layers by Flax's `tabulate`, which traces or records every public method that a call runs."""

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt
import jax_tt.linen

RULE = jax_tt.optimizers.SGD(0.1)
IDS = jnp.array([[1, 2]])
KEYS = jax_tt.dynamic.split_keys(np.array([[2**40, 2]]))
BAGS = jax_tt.Bags.from_ragged([[1, 2], [3]])
CACHE = jax_tt.RowCache(4, ways=2)
TABLES = {
    "dense": jax_tt.dense_table(10, 4, optimizer=RULE),
    "cached": jax_tt.tt_table(10, 4, tt_ranks=2, cache=CACHE),
    "hashed": jax_tt.hash_table(16, 4, safe_check="ignore"),
}
FEATURES = {name: jax_tt.Feature(name) for name in TABLES}
BATCH = {"dense": IDS, "cached": IDS, "hashed": KEYS}
# Of the class of a layer, its arguments, its input, and the shape of what it returns.
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any, str]] = {
    "TTEmbedBag": ((10, 4), {"cache": CACHE, "optimizer": RULE}, BAGS, "float32[2,4]"),
    "TableEmbedBag": ((TABLES["hashed"],), {}, KEYS, "float32[1,4]"),
    "TableEmbed": ((TABLES["hashed"],), {}, KEYS, "float32[1,2,4]"),
    "EmbedCollection": ((TABLES, FEATURES), {}, BATCH, "hashed: float32[1,4]"),
}
CONSOLE = {"width": 200, "force_terminal": False}


def layer_classes(module: Any, base: Any) -> list[Any]:
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found) and issubclass(found, base)
    ]


def public_methods(layer: Any) -> dict[str, Any]:
    members = inspect.getmembers(layer, inspect.isfunction)
    return {name: method for name, method in members if name[0] != "_" or name == "__call__"}


# One of each way that a layer is made.
@pytest.mark.parametrize("case", ["TTEmbedBag", "EmbedCollection", "TableEmbedBag"])
def test_nnx_tabulate(case: str) -> None:
    args, options, inputs, outputs = LAYERS[case]
    kind = getattr(jax_tt, case)
    before = public_methods(kind)
    layer = kind(*args, **options, rngs=nnx.Rngs(0))
    want = jax.tree.map(np.asarray, layer(inputs))
    for _ in range(2):
        found = nnx.tabulate(layer, inputs, console_kwargs=CONSOLE)
        assert outputs in found
        assert "│ state" not in found  # the only row of a layer is that of its call
    assert public_methods(kind) == before
    jax.tree.map(np.testing.assert_array_equal, layer(inputs), want)


@pytest.mark.parametrize("case", ["TableEmbed", "EmbedCollection"])
def test_linen_tabulate(case: str) -> None:
    args, options, inputs, outputs = LAYERS[case]
    layer = getattr(jax_tt.linen, case)(*args, **options)
    summary = nn.tabulate(  # pyright: ignore[reportPrivateImportUsage]
        layer, jax.random.key(0), compute_flops=True, console_kwargs=CONSOLE
    )
    found = summary(inputs)
    assert outputs in found
    assert f"│ {case} " in found  # without the name of another method than `__call__`
    assert summary(inputs) == found


@pytest.mark.parametrize(
    ("module", "base"), [(jax_tt.nnx, nnx.Module), (jax_tt.linen, nn.Module)], ids=["nnx", "linen"]
)
def test_layers_have_no_public_helpers(module: Any, base: Any) -> None:
    """Users may call every public function of a class, and `tabulate` does, so each is a page of the reference."""
    page = Path(__file__).parents[2].joinpath("docs", "api.md").read_text()
    described = {"setup", *re.findall(r"\w+", " ".join(re.findall(":members: (.*)", page)))}
    for kind in layer_classes(module, base):
        fields = getattr(kind, "__dataclass_fields__", {})
        names = [name for name in public_methods(kind) if not hasattr(base, name)]
        assert not set(names) - set(fields) - described, kind

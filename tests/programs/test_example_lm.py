"""The language model example: layers in the place of `nnx.Embed` have its losses."""

import numpy as np
import pytest

pytest.importorskip("flax")

from examples.lm import main

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")
ON_ONE_DEVICE = [name for name, variant in main.VARIANTS.items() if not variant.mesh]


def test_tokens_are_pairs_of_characters() -> None:
    tokens = main.read_tokens()
    assert len(tokens) > 100_000 and tokens.min() >= 0 and tokens.max() < main.VOCABULARY
    assert len(np.unique(tokens)) > 1000


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_step_of_embed_is_one_of_flax(tied: str) -> None:
    settings = main.Settings(features=8, context=4, batch=2, steps=2)
    of_flax, ours = (
        main.train(main.VARIANTS[f"{name}, {tied}"], settings, 1) for name in ("nnx.Embed", "Embed")
    )
    np.testing.assert_allclose(ours, of_flax, rtol=1e-3)


@pytest.mark.slow
def test_losses_are_those_of_flax() -> None:
    losses = main.main(["--variants", *ON_ONE_DEVICE])
    for ours, theirs in (
        ("Embed, tied", "nnx.Embed, tied"),
        ("Embed, untied", "nnx.Embed, untied"),
        ("Embed, fused input", "nnx.Embed, untied"),
    ):
        np.testing.assert_allclose(losses[ours], losses[theirs], rtol=0.02)
    assert losses["nnx.Embed, tied"][-1] < 0.9 * losses["nnx.Embed, tied"][0]
    for rank in (16, 32):
        train = losses[f"TTEmbed, rank {rank}, tied"]
        assert train[-1] < train[0]

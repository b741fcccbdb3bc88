"""The language model example: layers in the place of `nnx.Embed` have its losses."""

import numpy as np
import pytest

pytest.importorskip("flax")

from examples.lm import main

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")


def test_tokens_are_pairs_of_characters() -> None:
    tokens = main.read_tokens()
    assert len(tokens) > 100_000 and tokens.min() >= 0 and tokens.max() < main.VOCABULARY
    assert len(np.unique(tokens)) > 1000


def test_losses_are_those_of_flax() -> None:
    settings = main.Settings(features=8, context=4, batch=2, steps=3)
    pairs = {
        "Embed, tied": "nnx.Embed, tied",
        "Embed, untied": "nnx.Embed, untied",
        "Embed, fused input": "nnx.Embed, untied",
    }
    losses = {
        name: main.train(main.VARIANTS[name], settings, 1) for name in {*pairs, *pairs.values()}
    }
    for ours, of_flax in pairs.items():
        np.testing.assert_allclose(losses[ours], losses[of_flax], rtol=1e-3)


@pytest.mark.slow
def test_losses_of_trains_fall() -> None:
    (losses,) = main.main(
        ["--variants", "TTEmbed, rank 16, tied", "--steps", "8", "--every", "4"]
    ).values()
    assert losses[1] < losses[0]

"""The multilayer perceptron of both models."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx


class MLP(nnx.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: Sequence[int], *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)

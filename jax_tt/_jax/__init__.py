"""What JAX's transformations and platforms need."""

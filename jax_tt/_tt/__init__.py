"""The mathematics of tensor trains, on arrays."""

"""The mathematics of sets of slots, on arrays: which keys have one, which leave."""

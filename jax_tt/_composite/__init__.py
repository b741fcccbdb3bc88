"""Tables made of other tables: sums of their rows, and rows of different kinds."""

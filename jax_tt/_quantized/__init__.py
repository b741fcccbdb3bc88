"""Tables whose rows are rounded to a few bits a number."""

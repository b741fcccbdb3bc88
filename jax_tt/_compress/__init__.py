"""Small tables from trained rows, chosen by measurement."""

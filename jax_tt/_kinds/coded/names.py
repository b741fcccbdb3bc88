"""Names of the arrays of a coded table."""

CODEBOOKS, CODES = "codebooks", "codes"
# Of the ids that have more codes than the others.
HOT_CODES, HOT_PLACES = "hot_codes", "hot_places"

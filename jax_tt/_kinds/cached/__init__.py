"""Tables with a cache of rows."""

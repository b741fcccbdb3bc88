"""One benchmark case a file; each registers itself."""

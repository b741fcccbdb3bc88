"""One benchmark case per file; each registers itself."""

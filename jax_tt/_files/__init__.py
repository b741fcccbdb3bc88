"""Tables in files: reading them as untrusted input, and writing compressed ones."""

"""Tables in files: reading them without trusting them, and writing compressed ones."""

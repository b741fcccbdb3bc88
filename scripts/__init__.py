"""Tools of the project itself; nothing of the package needs them."""

"""Tables of codes."""

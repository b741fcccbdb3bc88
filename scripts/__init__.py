"""Development tools, which the package does not need."""

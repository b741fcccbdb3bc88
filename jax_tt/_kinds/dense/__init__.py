"""Dense tables."""

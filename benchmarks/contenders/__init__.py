"""The same work done by us and by the peers, one a file; each function returns a callable of i."""

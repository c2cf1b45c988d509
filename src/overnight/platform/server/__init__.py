"""The HTTP API: the one way in."""

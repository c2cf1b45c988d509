"""Clients of the HTTP API: the Python client and the agent loop."""

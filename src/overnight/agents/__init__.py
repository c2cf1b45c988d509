"""Clients of the HTTP API: the typed client, code snapshots, and how a server is found."""

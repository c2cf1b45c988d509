"""Pydantic models of what crosses a process boundary: `spec` (what to run), `api` (people and agents), `node`."""

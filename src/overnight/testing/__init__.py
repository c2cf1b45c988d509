"""Fakes for what a machine lacks, and fault scripts, for our tests and for users'."""

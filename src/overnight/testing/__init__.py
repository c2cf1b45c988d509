"""Fakes for what a machine lacks, and fault scripts, for our tests and for users'.

Importing this package is free; take what is needed from its modules: ``clock``, ``faults``, and ``plugin``, which
pytest loads by itself.
"""

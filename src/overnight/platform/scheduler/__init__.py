"""Decides which trial runs where: a pure core and the loop around it."""

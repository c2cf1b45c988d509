"""Checkpoints: staged, written, published by one rename, read only when every byte is as it was written."""

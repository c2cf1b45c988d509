"""Names, models, errors and small pure functions that every other package shares. No I/O."""

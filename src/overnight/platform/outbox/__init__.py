"""The outbox: a process of its own that tells MLflow what the store knows, so that MLflow delays and loses nothing."""

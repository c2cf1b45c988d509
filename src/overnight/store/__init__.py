"""The only place with SQL, and the only place that writes to MLflow."""

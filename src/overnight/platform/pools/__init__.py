"""Where devices come from."""

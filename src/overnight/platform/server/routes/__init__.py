"""The HTTP API, one module per noun. Handlers parse, call the store or a service, and answer; rules live elsewhere."""

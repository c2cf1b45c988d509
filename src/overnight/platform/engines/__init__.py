"""What starts processes on nodes."""

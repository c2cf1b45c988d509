"""What runs on a node: the daemon, the warm process (zygote) and the supervisor of an attempt."""

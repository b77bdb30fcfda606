"""Where replicas can run."""

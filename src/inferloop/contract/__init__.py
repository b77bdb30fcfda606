"""What is promised. Knows nothing of how it is kept."""

"""Many replicas. decide/ holds decisions without I/O; act/ carries them out."""

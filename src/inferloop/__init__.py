"""inferloop: a workload contract goes in, a measured and running inference service comes out."""

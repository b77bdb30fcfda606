"""Batch jobs: files of requests in, files of answers out, at the lowest priority, each row answered exactly once."""

"""Batch jobs: files of requests, worked off in the background of the others.

HTTP       routes -> files (upload) | batches      what goes over it: wire, paging
work       run: which batch, which row next (gate, job); input: the checked file; row: one row answered (kinds);
           output: the files it leaves
state      desk (one thread) -> store (SQLite) of records; folder: the files, one server at a time
all of it  service
"""

"""Processes, sockets and files of the fleet."""

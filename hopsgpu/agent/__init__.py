"""Supervises the ranks of one container: processes, ports, output, memory, uploads."""

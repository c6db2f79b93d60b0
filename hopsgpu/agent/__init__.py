"""The supervision of one container's ranks: processes, ports, output, memory, uploads."""

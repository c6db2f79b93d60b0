"""Speed and memory, each against a rival in the same run: `make bench`."""

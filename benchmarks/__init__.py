"""Speed and memory, each compared with a rival in the same run: `make bench`."""

"""The command line: one file per command, a skin over the library."""

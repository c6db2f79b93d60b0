"""Python environments that travel to the ranks: made at the driver, unpacked once on each node."""

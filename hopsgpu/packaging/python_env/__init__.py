"""Python environments for ranks: built at the driver, unpacked once on each node."""

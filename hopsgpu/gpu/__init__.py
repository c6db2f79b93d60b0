"""The GPUs of executors: the discovery script, node leases, health and samples."""

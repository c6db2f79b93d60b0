"""Which GPU: the discovery script, node leases, health, samples."""

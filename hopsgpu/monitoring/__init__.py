"""The cluster's GPUs, the gangs that wait and the runs, as metrics for Prometheus."""

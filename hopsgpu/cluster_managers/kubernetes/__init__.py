"""Kubernetes as a cluster manager: what its API server reports, and what hopsgpu asks of it."""

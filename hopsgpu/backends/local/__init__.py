"""Gangs on this machine alone, for a Spark session on a local master."""

"""Gangs on this machine alone, for a Spark session with a local master."""

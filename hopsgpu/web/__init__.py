"""`hopsgpu web`: the cluster, the line, runs, searches, models and usage as pages for a browser."""

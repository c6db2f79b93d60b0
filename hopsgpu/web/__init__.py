"""`hopsgpu web`: pages with the cluster, the queue of gangs, runs, models and usage."""

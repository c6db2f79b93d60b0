"""The only place that imports pyspark: sessions, profiles, jobs and the lease of executors."""

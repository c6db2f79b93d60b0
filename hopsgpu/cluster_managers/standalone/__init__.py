"""A client of the web interface of Spark standalone masters."""

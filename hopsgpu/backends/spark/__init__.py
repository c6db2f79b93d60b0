"""The executors of a Spark application, and all that hopsgpu asks of pyspark at the driver."""

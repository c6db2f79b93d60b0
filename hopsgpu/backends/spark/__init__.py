"""The executors of a Spark application. The only package that imports pyspark."""

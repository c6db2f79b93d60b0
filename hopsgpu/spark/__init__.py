"""Programs whose names are in administrators' files and therefore must not change.

`hopsgpu.spark.daemon` is the value of `spark.python.daemon.module`, and yarn-scripts/hopsgpu-submit
runs `python -P -m hopsgpu.spark.submission`.
"""

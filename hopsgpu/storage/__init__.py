"""File systems of the lake: HDFS, WebHDFS, object stores and local directories."""

"""File systems of the lake (HDFS, WebHDFS, local directories) and transfers to and from them."""

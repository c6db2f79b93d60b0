"""Which GPUs a container may use: the script that Spark runs on the node, and how it travels."""

"""Parquet on the lake as exact shards of the ranks, in batches that are read ahead and cached."""

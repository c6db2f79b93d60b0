"""Parquet on the lake to the ranks: exact shards, and batches read ahead and kept locally."""

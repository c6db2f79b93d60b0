"""Parquet on the lake for the ranks: exact shards, and batches read ahead and cached locally."""

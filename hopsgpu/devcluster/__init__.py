"""A real single-machine YARN, or Spark standalone cluster, and HDFS for development."""

from __future__ import annotations

from hopsgpu.devcluster.manage import ClusterInfo, down, environment, up
from hopsgpu.devcluster.status import ClusterStatus, status

__all__ = ["ClusterInfo", "ClusterStatus", "down", "environment", "status", "up"]

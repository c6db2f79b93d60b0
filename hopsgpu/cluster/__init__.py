"""A real single-machine YARN and HDFS for development."""

from __future__ import annotations

from hopsgpu.cluster.manage import ClusterInfo, down, environment, up
from hopsgpu.cluster.status import ClusterStatus, status

__all__ = ["ClusterInfo", "ClusterStatus", "down", "environment", "status", "up"]

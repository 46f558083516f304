"""The cluster: devices, links and routes between them, from a file, a line of text or this machine."""

from weft.cluster.cluster import Cluster, Contention, Device, DeviceId, DeviceKind, Link, LinkId, Route, check_cluster
from weft.cluster.cluster_file import load_cluster, read_cluster, save_cluster

__all__ = ["Cluster", "Contention", "Device", "DeviceId", "DeviceKind", "Link", "LinkId", "Route", "check_cluster",
           "load_cluster", "read_cluster", "save_cluster"]

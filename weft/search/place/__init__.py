"""Operator placement: which device runs which operator, for the lowest latency or the highest throughput."""

"""The search for the highest throughput: the least largest load of any device or link."""

"""The general solver for strategy graphs: one strategy per node, least cost, usage within the limit."""

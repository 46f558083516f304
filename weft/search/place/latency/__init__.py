"""The pieces of the search for the lowest latency: bounds, CP-SAT, parts in series, annealing."""

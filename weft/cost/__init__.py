"""Costs: how long operators, transfers and collectives take, each figure with its source; see ``costs``."""

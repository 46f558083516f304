"""Deployment: how a training graph is laid over any topology, and how gradients are exchanged."""

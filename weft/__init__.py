"""Weft plans how a neural network runs across many devices, predicts how fast that is, and runs it that way."""

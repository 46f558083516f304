"""Sharding: how every tensor of a model is split over a group of devices."""

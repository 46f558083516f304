"""Schedule search: in which order micro-batches flow through a given placement of blocks on devices."""

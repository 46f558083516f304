"""How operators and tensors are split over the devices of a group: factors, layouts, and what each device does."""

"""Plans in training scripts: ``weft.parallelize``, and plans made anew for the devices that are left."""

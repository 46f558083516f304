"""Problems of the public dnn-partitioning benchmark, by its own definitions and both of its objectives."""

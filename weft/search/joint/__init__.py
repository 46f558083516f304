"""Data, tensor and pipeline parallelism searched together: stages on sub-meshes of any cluster."""

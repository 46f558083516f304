"""Which tensors a stage keeps for its backward and which it makes again, within bytes and in least extra time."""

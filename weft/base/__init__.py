"""What every package needs: errors with exit codes, units, files, temporary folders, and the adapter to numba."""

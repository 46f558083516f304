"""Plans in training scripts: a module becomes one rank's part of a plan (``parallelize``, ``trainer``).

Batches are looked at before they are used (``batches``), and plans are made anew for the devices that are left
(``parallelize``, which alone reaches for the planner).
"""

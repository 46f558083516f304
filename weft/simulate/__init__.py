"""Simulation: when each instruction of a program would run, and what that says about the plan."""

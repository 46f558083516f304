"""Graphs made smaller: operators that the backend runs as one become one."""

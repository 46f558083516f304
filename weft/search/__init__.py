"""Searchers: each finds plans of one kind; all speak the plan language and are judged by the one simulator."""

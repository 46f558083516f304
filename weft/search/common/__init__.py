"""What all searchers share: the problem they get, what they may spend, the best so far, and the adapter to CP-SAT."""

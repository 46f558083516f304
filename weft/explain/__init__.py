"""Why a plan takes as long as it does, what would help, and what would make an impossible request possible."""

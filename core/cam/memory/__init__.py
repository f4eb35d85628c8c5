"""Memory that ranks of one host share: segments, and how they are handed over."""

"""The worker group: ranks, messages and the wire between front end and rank 0. Knows no HTTP."""

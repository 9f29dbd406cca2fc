"""Neighbour sampling, slicing and transfer that never leave the trainer waiting."""

"""Inputs that nobody should hand in, handed in: to every layer and every op, in a process of its own."""

"""stretto: graph neural networks written in PyTorch Geometric, several times faster, with two lines added."""

__version__ = "0.1.0"

"""PyTorch alone: the base class of the other backends, and their reference."""

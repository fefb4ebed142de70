"""The decoder models that Legato runs: one description and one forward pass for all."""

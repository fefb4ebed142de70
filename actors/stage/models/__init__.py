"""The decoder family Legato runs: one description and one forward pass for all of them."""

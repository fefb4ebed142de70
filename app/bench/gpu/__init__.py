"""`legato bench gpu`: prove and time the CUDA path, in one report."""

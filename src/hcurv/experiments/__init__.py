"""Data sets, reference networks and the demonstration; needs the optional dependencies."""

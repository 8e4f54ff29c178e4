"""Putting the fused projections into models of other projects, one instance at a time."""

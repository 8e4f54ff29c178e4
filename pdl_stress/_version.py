"""The version of pdl-stress, in one place: the build reads it from here, and so does the result file."""

__version__ = "0.1.0"

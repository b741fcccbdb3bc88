"""The version of the library, which the build reads."""

__version__ = "0.1.0"

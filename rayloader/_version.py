"""The version of this library, for its metadata and for what states say."""

__version__ = "0.1.0"

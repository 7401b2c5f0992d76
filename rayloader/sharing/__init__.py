"""One loader for many consumers: the actor that iterates over it, and what its consumers fetch from there."""

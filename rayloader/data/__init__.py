"""Datasets of our own."""

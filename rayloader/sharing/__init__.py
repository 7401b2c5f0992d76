"""One pipeline for many consumers: the actor that hosts the loader, and its readers."""

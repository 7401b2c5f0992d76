"""One pipeline for many consumers: who has read how far, the process that hosts the loader, and the way to it."""

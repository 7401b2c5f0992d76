"""One pipeline for many consumers: how far each has read, the process that hosts the loader, and the link to it."""

"""Ray's session, the fork server, and the ranks of torchrun."""

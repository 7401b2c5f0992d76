"""Ray's session, and the fork server."""

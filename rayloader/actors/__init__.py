"""All of Ray: its session, the actors of this process, and the channels to them."""

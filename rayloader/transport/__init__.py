"""How data travels: the codec, the arenas of one node, and the building blocks of replicas' images."""

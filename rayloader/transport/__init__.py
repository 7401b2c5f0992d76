"""How payloads travel: the codec, the arenas of one node, the image that replicas are opened from."""

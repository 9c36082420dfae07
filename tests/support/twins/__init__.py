"""The readable twins of fast paths: slow, obvious, and with the same results. Property tests tie each pair together."""

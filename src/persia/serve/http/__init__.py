"""Serves a predictor over HTTP, in JSON, msgpack and Arrow. Needs the extra `serve`."""

"""A predictor over HTTP: JSON for people, msgpack and Arrow for machines. Needs the extra `serve`."""

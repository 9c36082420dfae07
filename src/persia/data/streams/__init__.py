"""Streams: topics of Kafka, directories that grow, joins of two streams, and the data loader that reads them."""

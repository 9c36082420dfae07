"""One codec for each media type of requests and answers: JSON, msgpack and Arrow."""

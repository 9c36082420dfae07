"""The NN worker's side: embeddings as torch tensors, prefetching, models."""

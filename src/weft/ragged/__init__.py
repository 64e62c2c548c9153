"""RaggedTensor, the variant encoding, and the ragged ops."""

"""The op families. Each file holds ops and, right below each, its gradient."""

"""The commands of `python -m weft`."""

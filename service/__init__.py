"""The front end: HTTP in, HTTP out. Knows no tensors beyond bytes and shapes, and imports no torch."""

"""Images to rows: the DeepSeek-V4 / V4.1 vision tower. Knows images and tensors, no sockets."""

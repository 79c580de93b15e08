"""The encoder: weights, images and increments in, head-input features out."""

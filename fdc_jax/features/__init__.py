"""Features: files of them, from any encoder, and their extraction by the encoders of a run."""

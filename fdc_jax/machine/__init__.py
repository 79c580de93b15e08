"""The machine: devices, processes, files and checkpoints."""

"""What a run needs of the machine and of no paper: devices, processes, files, checkpoints."""

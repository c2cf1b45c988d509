"""What a training script imports: the run, its data, its checkpoints."""

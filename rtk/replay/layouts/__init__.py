"""What one rank of a training job holds: its layers, its rows, and the tensors that its routers replay."""

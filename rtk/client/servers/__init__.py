"""What inference servers are asked and how they answer. Nothing here does any I/O."""

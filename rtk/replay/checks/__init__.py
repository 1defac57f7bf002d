"""Whether routes fit a shard's routers: the named checks, the hypotheses that explain a failure, the report."""

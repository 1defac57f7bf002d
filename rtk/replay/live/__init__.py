"""All that touches megatron-core. Nothing else in `rtk.replay` imports torch."""

"""What a model looks like from outside: which layers are MoE layers, and how wide their routers are."""

from rtk.layout.model_layout import ModelLayout

__all__ = ["ModelLayout"]

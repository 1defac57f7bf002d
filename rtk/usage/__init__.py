"""Which experts the routers choose, and for what: the analyses of the MoE papers, on traces.

NumPy and pandas in and out, no model and no server. Layers count from 0 and dense layers are absent. A load is
counted in assignments: a token that goes to top-k experts counts once for each of them. docs/analyses.md lists the
questions, the call that answers each, and its paper; what compares two engines or checkpoints is in `rtk.compare`.
"""

from rtk.usage.consecutive import repetition
from rtk.usage.distance import load_distance, prompt_vs_generated
from rtk.usage.load import counts, experts, table
from rtk.usage.pairs import coactivation, transitions
from rtk.usage.pictures import heatmap, heatmaps
from rtk.usage.ranks import rank_load
from rtk.usage.selection import Span
from rtk.usage.specialization import domain_specialization, vocabulary_specialization

__all__ = [
    "Span",
    "coactivation",
    "counts",
    "domain_specialization",
    "experts",
    "heatmap",
    "heatmaps",
    "load_distance",
    "prompt_vs_generated",
    "rank_load",
    "repetition",
    "table",
    "transitions",
    "vocabulary_specialization",
]

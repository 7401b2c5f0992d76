"""Plans: samplers whose batches are a function of lengths or weights, seed and epoch. Optional; it needs NumPy only.

Any loader that takes samplers takes them, torch's own too. Import from here::

    from rayloader.plans import Mixture, Packing, PackedStream, TokenBudget, Cuts, lengths, pack_collate
"""

from rayloader.plans.budgets import Packing, TokenBudget
from rayloader.plans.mixture import Mixture
from rayloader.plans.packs import Cuts, PackedStream, pack_collate
from rayloader.plans.sample_lengths import lengths

__all__ = ["Cuts", "Mixture", "PackedStream", "Packing", "TokenBudget", "lengths", "pack_collate"]

"""To be imported before Lightning and Transformers, which import torchvision if it is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import vision_operators  # noqa: F401

"""Lets torchvision be imported beside any torch; to be imported before Lightning and Transformers, which import it.

The wheels of torchvision on the package index are built for the index's own torch. Beside another build, such as one
for the CPU, their C extension is not loaded, and the import fails because it describes two operators of that extension.
Nothing here uses these operators, so they are declared before that import.
"""

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # they last as long as this object
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

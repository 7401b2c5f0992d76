"""An accelerator that is none, in the place of torch's."""

import torch

from rayloader.gpu import device


def pretend_accelerator(monkeypatch, pin, index=0, set_index=lambda index: None):
    """Lets torch find a CUDA device with this index, and pins tensors with a function; it page-locks nothing else."""
    monkeypatch.setattr(device, "current", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_index)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: pin(tensor))
    # The loader of torch 2.6 asks these.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)

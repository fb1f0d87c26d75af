"""Bytes that results of operators hold while a test runs, counted by storage on any device."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """What is still held by anything: each storage once, views not at all. ``most``: the largest there was at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.n_bytes())
        return out

    def n_bytes(self):
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        return sum(n for _, n in self.storages.values())

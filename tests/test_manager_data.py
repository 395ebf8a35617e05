"""The random walks once more, on real tensors: what `gather_kv` finds must be what was written for the tokens.

On the GPU where there is one, and the host's blocks in host memory.
"""

import numpy as np
import torch
from conftest import DEVICES
from hypothesis import HealthCheck, settings
from manager_machine import ManagerMachine

from paged_kv import PagedKVCache, ops

NUM_LAYERS = 2
HEAD_DIM = 3


class TensorCache:
    """Two layers; a key holds the token's number in its first element and the layer's in its second."""

    def __init__(self, num_blocks, num_host_blocks, block_size):
        self.device = PagedKVCache(
            NUM_LAYERS,
            1,
            HEAD_DIM,
            torch.float32,
            block_size,
            num_blocks=num_blocks,
            layout="NHD",
            device=DEVICES[-1],
        )
        self.host = self.device.like(max(1, num_host_blocks))

    def write(self, slots, values):
        for layer in range(NUM_LAYERS):
            key = torch.zeros(len(slots), 1, HEAD_DIM)
            key[:, 0, 0] = torch.from_numpy(values)
            key[:, 0, 1] = layer
            key, new_slots = (t.to(DEVICES[-1]) for t in (key, torch.from_numpy(np.ascontiguousarray(slots))))
            self.device.write(layer, key, -key, new_slots)

    def copy(self, pairs):
        self.device.copy_blocks(pairs)

    def swap_out(self, pairs):
        self.device.swap_blocks(self.host, pairs)

    def swap_in(self, pairs):
        self.host.swap_blocks(self.device, pairs)

    def read(self, manager, seq_id, group, start):
        table = torch.from_numpy(manager.block_tables([seq_id], group)).to(DEVICES[-1])
        seq_lens = torch.from_numpy(manager.seq_lens([seq_id])).to(DEVICES[-1])
        found = []
        for layer in self.device:
            key, value = ops.gather_kv(layer.key, layer.value, table, seq_lens)
            assert torch.equal(key[start:], -value[start:])
            found.append(key[start:, 0])
        assert all((key[:, 1] == layer).all() for layer, key in enumerate(found))
        assert torch.equal(found[0][:, 0], found[1][:, 0])
        return found[0][:, 0].long().tolist()


class DataMachine(ManagerMachine):
    cache_type = TensorCache


TestData = DataMachine.TestCase
TestData.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

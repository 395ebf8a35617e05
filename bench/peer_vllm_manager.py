"""vLLM's KVCacheManager as a worker, called as its scheduler calls it: see manager_worker.py.

Its requests hash their prompts when they are made; here that is done in the timed part, and the rest of making a
request is not. One block more than asked for, as vLLM keeps one for itself.
"""

import time

import torch
import vllm
from manager_worker import Job, Request, Times, serve
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

init_none_hash(sha256)


class VllmMemory:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
        )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.params = SamplingParams(max_tokens=1 << 20)
        self.times = Times()
        self.num_prompt_blocks = 0
        self.requests: dict[Job, VllmRequest] = {}
        self._jobs: list[Job] = []
        self._running: list[VllmRequest] = []
        self._spent = 0.0  # in decode steps that found no room

    def fits(self, request: Request) -> bool:
        return -(-request.num_tokens // self.block_size) <= self.num_blocks

    def admit(self, job: Job) -> int | None:
        manager = self.manager
        request = self.requests.get(job)
        if request is None:
            tokens = job.tokens().tolist()
            request = VllmRequest(str(job.index), tokens, self.params, None)
            request._block_hasher = self.hasher
            self.requests[job] = request
            with self.times.of("prompt"):
                request.update_block_hashes()
        with self.times.of("prompt"):
            blocks, num_cached, _ = manager.get_computed_blocks(request)
            num_new = request.num_tokens - num_cached
            if manager.allocate_slots(request, num_new, num_cached, blocks) is None:
                return None
            request.num_computed_tokens = request.num_tokens
            request.status = RequestStatus.RUNNING
        self.num_prompt_blocks += -(-request.num_tokens // self.block_size) - num_cached // self.block_size
        return num_cached

    def decode(self, jobs: list[Job]) -> bool:
        if jobs != self._jobs:
            self._jobs = list(jobs)
            self._running = [self.requests[job] for job in jobs]
        tokens = [job.next_token() for job in jobs]
        # A request that found no room, or stood before one that didn't, has its token already.
        lengths = [job.request.prompt_len + job.generated + 1 for job in jobs]
        manager = self.manager
        started = time.thread_time()
        for request, token, length in zip(self._running, tokens, lengths, strict=True):
            if request.num_tokens < length:
                request.append_output_token_ids(token)
            if request.num_computed_tokens < length:
                if manager.allocate_slots(request, 1) is None:
                    self._spent += time.thread_time() - started
                    return False
                request.num_computed_tokens += 1
        self.times.decode.append((self._spent + time.thread_time() - started, len(jobs)))
        self._spent = 0.0
        return True

    def preempt(self, job: Job) -> None:
        request = self.requests[job]
        with self.times.of("release"):
            self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def finish(self, job: Job) -> None:
        request = self.requests.pop(job)
        with self.times.of("release"):
            self.manager.free(request)


serve(vllm.__version__, VllmMemory)

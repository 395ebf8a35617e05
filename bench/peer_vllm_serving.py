"""vLLM end to end, run by serving.py in vLLM's environment: python peer_vllm_serving.py JOB.json

Writes tokens, seconds and the mean number of requests in a step, while others waited, to JOB.json.answer.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be looked at

import torch
from vllm import LLM, SamplingParams

path = Path(sys.argv[1])
job = json.loads(path.read_text())
llm = LLM(
    job["model"],
    dtype="float32",
    block_size=job["block_size"],
    num_gpu_blocks_override=job["num_blocks"] + 1,  # it keeps one for itself
    max_model_len=job["max_model_len"],
    max_num_batched_tokens=max(512, job["max_model_len"]),
    max_num_seqs=64,
    gpu_memory_utilization=0.2,  # of the CPU's memory, of which the override takes a little
    enforce_eager=True,
)
engine = llm.llm_engine
scheduler = engine.engine_core.engine_core.scheduler


def serve(requests):
    tokens, running = {}, []
    started = time.perf_counter()
    for i, (prompt, new) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        ended = [output for output in engine.step() if output.finished]
        for output in ended:
            tokens[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        if len(scheduler.waiting):
            running.append(len(scheduler.running) + len(ended))
    seconds = time.perf_counter() - started
    batch = sum(running) / max(1, len(running))
    answers = [tokens[i] for i in range(len(requests))]
    return {"tokens": answers, "seconds": seconds, "batch": batch, "threads": torch.get_num_threads()}


serve([([1, 2, 3], 4)])  # warm up
Path(f"{path}.answer").write_text(json.dumps(serve(job["requests"])))

"""TRL's AsyncGRPOTrainer on CPU: its trainer, packing, loss and staleness filter, unchanged.

Runs in TRL's virtual environment:

    OMP_NUM_THREADS=1 PYTHONPATH=benchmarks python benchmarks/peers/trl/async_grpo.py JOB.json

TRL's own worker needs a vLLM server and NCCL, its attention a FlashAttention 3 kernel. It lets worker and
weight transfer be injected, so here a child process samples whole batches with transformers' `generate` and
reads weights in shared memory, and the tree attention is a loop over SDPA.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from peers.start import reward
from peers.trl.job import Job, StepLog, read_job

# ---------------------------------------------------------------- the generator's process


def generate_until_stopped(job: Job, weights: Any, version: Any, samples: Any, stop: Any) -> None:
    """Groups in the order of the prompts, `job.groups` at a time, always under the newest weights.

    `weights` gives once the tensors that the trainer writes; `version` counts its writes, under its lock.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.start, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.start, dtype=getattr(torch, job.dtype)).eval()
    rows, first, loaded, shared = job.rows(), 0, 0, weights.get()
    while not stop.is_set():
        if version.value > loaded:
            with version.get_lock():
                model.load_state_dict(shared, strict=False)
                loaded = version.value
        batch = [rows[(first + i) % len(rows)] for i in range(job.groups)]
        for sample in _samples(job, model, tokenizer, batch, first, loaded):
            while not stop.is_set():
                try:
                    samples.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    continue
        first += job.groups


@torch.no_grad()
def _samples(
    job: Job, model: Any, tokenizer: Any, rows: list[Any], first: int, version: int
) -> Iterator[Any]:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    each = [row for row in rows for _ in range(job.group_size)]
    texts = [row["prompt"] for row in each]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    out = model.generate(
        **inputs,
        max_new_tokens=job.max_tokens,
        do_sample=True,
        temperature=job.temperature,
        top_k=0,
        top_p=1.0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sampled = out.sequences[:, inputs["input_ids"].shape[1] :]
    logprobs = torch.stack(
        [
            torch.log_softmax(logits.float() / job.temperature, -1).gather(-1, tokens[:, None])[:, 0]
            for logits, tokens in zip(out.logits, sampled.T, strict=True)
        ],
        1,
    )
    ends = torch.isin(sampled, torch.tensor(model.generation_config.eos_token_id))
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, sampled.shape[1]).tolist()
    completions = [sampled[i, :n] for i, n in enumerate(lengths)]
    decoded = [tokenizer.decode(c, skip_special_tokens=True) for c in completions]
    scores = [reward(c, row["answer"], job.extract) for c, row in zip(decoded, each, strict=True)]
    by_group = torch.tensor(scores).view(len(rows), job.group_size)
    centred = by_group - by_group.mean(1, keepdim=True)
    advantages = (centred / (by_group.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    for i, completion in enumerate(completions):
        prompt = inputs["input_ids"][i][inputs["attention_mask"][i].bool()]
        padding = np.zeros(len(prompt))
        yield RolloutSample(
            prompt=[],
            completion=[],
            input_ids=torch.cat([prompt, completion]).numpy(),
            completion_mask=np.concatenate([padding, np.ones(len(completion))]).astype(np.int64),
            old_log_probs=np.concatenate([padding, logprobs[i, : len(completion)].numpy()]).astype(
                np.float32
            ),
            advantage=advantages[i],
            model_version=version,
            group_id=first + i // job.group_size,
            metrics={"reward": scores[i], "completion_tokens": float(len(completion))},
            enqueued_at=time.time(),
        )


# ---------------------------------------------------------------- what is injected into the trainer


class Worker:
    """The generator's process, behind TRL's protocol of a rollout worker."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.rollout_buffer = context.Queue(2 * job.groups * job.group_size)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.weights, self.version, self.stop_event = context.Queue(), context.Value("q"), context.Event()
        arguments = (job, self.weights, self.version, self.rollout_buffer, self.stop_event)
        self._process = context.Process(target=generate_until_stopped, args=arguments, daemon=True)

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self.stop_event.set()
        self._process.join(5)
        self._process.terminate()

    def update_model_version(self, version: int) -> None:
        """Samples carry the version of the weights they were drawn under."""

    def check_health(self, stale_after_s: float) -> None:
        if not self._process.is_alive():
            raise RuntimeError("the generator died")


class Transfer:
    """Every parameter through memory that both processes share; versions count transfers, as TRL's do."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._shared: dict[str, torch.Tensor] = {}

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights, is_first = {name: tensor.detach() for name, tensor in named}, not self._shared
        if is_first:
            self._shared = {n: torch.empty_like(w, device="cpu").share_memory_() for n, w in weights.items()}
        with self._worker.version.get_lock():
            for name, tensor in weights.items():
                self._shared[name].copy_(tensor)
            self._worker.version.value += 1
        if is_first:
            self._worker.weights.put(self._shared)


def tree_attention_on_cpu(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = (tensor[0] for tensor in (query, key, value))
    starts_q, starts_k, outs = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist(), []
    for i in range(len(starts_q) - 1):
        index = tree_kv_index[starts_k[i] : starts_k[i + 1]]
        rows = slice(starts_q[i], starts_q[i + 1])
        num_q, num_k = starts_q[i + 1] - starts_q[i], len(index)
        mask = None if num_q == num_k else torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        attended = F.scaled_dot_product_attention(
            q[None, :, rows],
            k[None, :, index],
            v[None, :, index],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outs.append(attended)
    return torch.cat(outs, 2).transpose(1, 2), None


# ---------------------------------------------------------------- the run


def make_trainer(job: Job, worker: Worker) -> Any:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing.tree_attention = tree_attention_on_cpu
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it would ask CUDA

    class LoggedTrainer(AsyncGRPOTrainer):
        log_file: StepLog

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log(logs, start_time)
            last = self.state.log_history[-1]
            if "loss" in last:
                tokens = last["completion_tokens"] * job.groups * job.group_size
                wait_s = last.get("perf/rollout_wait_s", 0.0)
                stale = last.get("sample/staleness_mean", 0.0)
                dropped = last.get("sample/dropped_stale_total", 0.0)
                self.log_file.write(
                    self.state.global_step,
                    tokens=tokens,
                    reward=last["reward"],
                    wait_s=wait_s,
                    staleness=stale,
                    dropped=dropped,
                )

    batch = job.groups * job.group_size
    arguments = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=job.steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=job.group_size,
        max_completion_length=job.max_tokens,
        temperature=job.temperature,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        token_budget=0,
        max_staleness=job.staleness_max,
        weight_sync_steps=1,
        logging_steps=1,
        bf16=job.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=job.seed,
        max_inflight_tasks=batch,
    )
    return LoggedTrainer(
        model=job.start,
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),  # the worker scores
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "unused"}]}] * batch),
        processing_class=AutoTokenizer.from_pretrained(job.start, padding_side="left"),
        rollout_worker=worker,
        weight_transfer=Transfer(worker),
    )


def main() -> None:
    job = read_job()
    torch.set_num_threads(job.threads)
    worker = Worker(job)
    trainer = make_trainer(job, worker)
    trainer.log_file = StepLog(job.out)
    try:
        trainer.train()
    finally:
        worker.stop()


if __name__ == "__main__":
    main()

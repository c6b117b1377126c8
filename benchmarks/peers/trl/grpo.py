"""TRL's GRPOTrainer: generate a batch with transformers' `generate`, then train on it. Runs in TRL's venv.

OMP_NUM_THREADS=1 PYTHONPATH=benchmarks python benchmarks/peers/trl/grpo.py JOB.json
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from peers.start import reward
from peers.trl.job import StepLog, read_job

job = read_job()
torch.set_num_threads(job.threads)


class LoggedTrainer(GRPOTrainer):
    log_file: StepLog
    tokens = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._generate_single_turn(*args, **kwargs)
        self.tokens += sum(len(completion) for completion in out[0])
        return out

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        last = self.state.log_history[-1]
        if "reward" in last:
            self.log_file.write(self.state.global_step, tokens=self.tokens, reward=last["reward"])
            self.tokens = 0


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [reward(c, a, job.extract) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=job.steps,
        per_device_train_batch_size=job.groups * job.group_size,
        num_generations=job.group_size,
        gradient_accumulation_steps=1,
        max_completion_length=job.max_tokens,
        temperature=job.temperature,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=job.dtype == "bfloat16",
        use_cpu=job.device == "cpu",
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=job.seed,
    )
    trainer = LoggedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.start, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(job.rows()),
        reward_funcs=score,
        processing_class=AutoTokenizer.from_pretrained(job.start, padding_side="left"),
    )
    trainer.log_file = StepLog(job.out)
    trainer.train()


if __name__ == "__main__":
    main()

"""`[sampling]` and `[rollout]`: how completions are drawn, and what generates them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from millrace.config.tables.section import COUNT_MAX, Count, CountOrZero, Section

StopString = Annotated[str, Field(min_length=1)]


class SamplingConfig(Section):
    max_tokens: Count = 128
    """Longest completion. A completion of this length is truncated."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Training: 0.01 to 100. Evaluation: 0, too, which takes the most probable token."""
    top_p: float = Field(default=1.0, ge=0.01, le=1)
    """Sample from the smallest set of tokens that has this probability. 1 is off."""
    top_k: CountOrZero = 0
    """Sample from this many most probable tokens. Training: 2 or more. 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this fraction of the highest probability. 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Tokens of the prompt and of all turns so far: positive logits are divided, negative ones multiplied. 1
    is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of every token that the model sampled in the present turn."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of a token once for each time that the model sampled the token in the present
    turn."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a completion, beside the tokenizer's end-of-sequence token."""
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """Ids of more tokens that end a completion."""
    ignore_eos: bool = False
    """The end-of-sequence token does not end a completion; `stop`, `stop_token_ids` and `max_tokens` do."""
    allowed_token_ids: tuple[CountOrZero, ...] | None = Field(default=None, min_length=2)
    """Only these tokens are sampled. `"none"`: all tokens."""
    banned_token_ids: tuple[CountOrZero, ...] = ()
    """These tokens are never sampled."""
    logprobs: int = Field(default=0, ge=0, le=20)
    """The number of most likely tokens to keep at each position, for `millrace show --trajectory`. 0 is off.
    Each takes 8 bytes a position, in a replica's messages and, before compression, in the ledger."""
    token_masks: bool = True
    """Where `top_p`, `top_k` or `min_p` cut tokens off, the ids of all others are kept at each position. The
    trainer renormalises over these. Each takes 4 bytes. See docs/models.md."""
    routing: bool = False
    """With a mixture of experts: the experts of each sampled token are kept, and the trainer uses the same.
    One byte for each layer and expert of a token, two with 256 experts or more. See docs/models.md."""

    @model_validator(mode="after")
    def _something_is_left(self) -> SamplingConfig:
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise ValueError("`sampling.banned_token_ids` bans all of `sampling.allowed_token_ids`")
        return self


class Rollout(Section):
    replicas: int = Field(default=2, ge=1, le=4096)
    """Number of inference processes."""
    engine: Literal["own", "vllm", "server"] = "own"
    """Inference software in a replica. A setting that the engine cannot follow is refused at the start.
    `"server"` follows from `servers`."""
    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^/?#@]+/?$")], ...] = ()
    """URLs of running servers, vLLM or SGLang, each for this run alone. Each has a replica, so `replicas`
    follows. See docs/engine.md."""
    shared_dir: str | None = None
    """Directory in which servers find new weights. They must see it under the same path. `"none"`: `weights`
    in the run directory."""
    python: str | None = None
    """Path of the Python that runs the replicas, for an engine that needs it. `"none"`: Millrace's Python."""
    packed: bool = False
    """Replicas fill one host after the other, so that few need a relay. False: they are spread over all."""
    colocated: bool = False
    """Replicas and trainer use the same devices, in shifts: one side sleeps while the other computes. For one
    GPU. Needs a staleness bound of 0, or `schedule.kind` `"llamarl"` or `"areal"` with 1. See
    docs/placement.md."""
    slots: int = Field(default=32, ge=1, le=65_536)
    """Trajectories that one replica decodes at the same time."""
    max_sequence_tokens: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Most tokens of a prompt and its completion together. Longer prompts are skipped and counted."""
    tensor: int = Field(default=1, ge=1, le=64)
    """Devices of one replica: each holds a part of every layer (tensor parallelism). On a CPU, processes."""
    prefill_chunk: int = Field(default=512, ge=16, le=COUNT_MAX)
    """Prompt tokens computed between two decode steps."""
    report_interval_s: float = Field(default=0.1, ge=0.001, le=0.5)
    """Time between two reports of a replica, each with its new tokens. Longer in a large fleet: the
    replicas with which a run starts send at most 256 such reports a second together, and each sends two
    within `supervision.heartbeat_timeout_s`. Trajectories that have ended are reported at once, or five times
    in this time while others wait for a slot."""
    exact: bool = False
    """Tokens and log-probs of a trajectory are the same, bit for bit, beside any other trajectories, on any
    replica, and after any restart. Slower, on a CPU only, on one thread. Refused where the promise cannot
    be kept."""
    recompute: bool = True
    """After new weights, keys and values of trajectories in flight are computed again. False: a trajectory
    goes on with its old keys and values. This is faster, but its log-probs belong to no single version."""
    keep_kv: bool = True
    """Keys and values of a trajectory stay in its replica between two turns, while there is room. The next
    turn computes those of new tokens alone. False: Millrace's own engine computes all of them again."""
    quantization: Literal["fp8"] | None = None
    """vLLM rounds the matrices of every layer to 8 bits at each load: half of their memory. The trainer
    computes and publishes in bfloat16 as ever, which `model.dtype` must be. See docs/placement.md."""
    stepwise: bool = False
    """vLLM computes inside the replica, one step at a time: equal work in equal order gives equal tokens.
    False: vLLM generates all the time in a process of its own, and a load pauses it."""
    seeded: bool = True
    """Each trajectory has noise of its own in vLLM and SGLang, which costs time in each step. False: they
    draw all noise together. Then a trajectory that is started again or moved samples other tokens, and no
    run repeats."""
    probe: bool = True
    """Each replica samples a few hundred tokens before its first trajectory. An engine that does not sample
    as its log-probs say ends the run. See docs/engine.md."""
    drafts: Literal["earlier", "trained", "ngram", "suffix", "mtp", "eagle"] | None = None
    """Source of draft tokens: guesses that the model checks several at a time. In Millrace's engine a draft
    changes no token and no log-prob, only the time. It takes `"earlier"` completions, or a `"trained"`
    drafter. vLLM takes `"ngram"`, `"suffix"`, `"mtp"` or `"eagle"`, and needs `seeded = false`. See
    docs/engine.md."""
    draft_tokens: int = Field(default=4, ge=1, le=64)
    """Most draft tokens of a trajectory in one step."""
    draft_rows_max: int = Field(default=8, ge=1, le=65_536)
    """Drafts are made while a replica has at most this many running trajectories: the tail of a batch."""
    draft_model: str | None = None
    """Directory of the draft model, for `"eagle"` alone."""
    native_adapters: bool = False
    """vLLM computes a LoRA adapter beside the base weights, so a load copies the adapter alone. Decode steps
    take longer. False: the replica merges each adapter into whole weights. See docs/models.md."""

    @model_validator(mode="before")
    @classmethod
    def _one_replica_for_each_server(cls, given: Any) -> Any:
        servers = given.get("servers") if isinstance(given, dict) else None
        if not isinstance(servers, list | tuple):
            return given
        derived = {"engine": "server", "replicas": len(servers)} if servers else {}
        return derived | given | {"servers": tuple(servers)}  # strictly, only JSON's lists are tuples

    @model_validator(mode="after")
    def _servers_agree(self) -> Rollout:
        if bool(self.servers) != (self.engine == "server"):
            raise ValueError(
                f"`rollout.engine` ({self.engine}) does not go with {len(self.servers)} `rollout.servers`: "
                "name servers, and leave the engine out"
            )
        if self.servers and self.replicas != len(self.servers):
            raise ValueError(
                f"`rollout.replicas` ({self.replicas}) must be the number of `rollout.servers` "
                f"({len(self.servers)}): leave it out"
            )
        if len({server.rstrip("/") for server in self.servers}) < len(self.servers):
            raise ValueError("`rollout.servers` names a server twice: each has one replica")
        return self

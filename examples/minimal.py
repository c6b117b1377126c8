"""GRPO and AIPO on one page: plain torch and transformers, synchronous, without the framework.

    python examples/minimal.py

A tiny random model learns to repeat the digit it is given (reward: the fraction of right tokens), in a
dozen seconds on one core. A test holds that these losses and updates equal the framework's.

Shape suffixes: B = sequences of a batch, groups one after another; T = positions of a completion.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

DIGITS, PROMPTS, GROUP_SIZE, MAX_TOKENS, TEMPERATURE = 10, 8, 8, 6, 1.0


def make_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=DIGITS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config).eval()


def completion_logprobs(model, prompts_BP, tokens_BT, temperature):
    """Log-probs of each completion token under the distribution that sampling uses: (B, T)."""
    logits = model(input_ids=torch.cat([prompts_BP, tokens_BT], dim=1)).logits
    logits_BTV = logits[:, prompts_BP.shape[1] - 1 : -1] / temperature
    return logits_BTV.log_softmax(-1).gather(-1, tokens_BT[..., None])[..., 0]


@torch.no_grad()
def sample(model, prompts_BP, max_tokens, temperature):
    """Sample completions, and record the log-prob of every token when it is drawn: (B, T) each."""
    tokens, logprobs = prompts_BP, []
    for _ in range(max_tokens):
        logprobs_BV = (model(input_ids=tokens).logits[:, -1] / temperature).log_softmax(-1)
        drawn_B1 = torch.multinomial(logprobs_BV.exp(), 1)
        logprobs.append(logprobs_BV.gather(-1, drawn_B1))
        tokens = torch.cat([tokens, drawn_B1], dim=1)
    return tokens[:, prompts_BP.shape[1] :], torch.cat(logprobs, dim=1)


def advantages(rewards_B, group_size, scale):
    """Compare each reward with the mean of its group."""
    groups = rewards_B.view(-1, group_size)
    centered = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        centered = centered / (groups.std(1, keepdim=True, correction=0) + 1e-6)
    return centered.flatten()


def grpo_loss(current_BT, behavior_BT, advantages_B, mask_BT, *, clip=0.2, correction=2.0):
    """Clipped policy gradient, arXiv:2402.03300, with the truncated importance weight of arXiv:2505.24298.

    The proximal policy is the current one, since one step is made per batch: the ratio is 1.
    """
    proximal_BT = current_BT.detach()
    ratio_BT = (current_BT - proximal_BT).exp()
    weight_BT = (proximal_BT - behavior_BT).exp().clamp(max=correction)
    a_B1 = advantages_B[:, None]
    gain_BT = torch.minimum(ratio_BT * a_B1, ratio_BT.clamp(1 - clip, 1 + clip) * a_B1)
    return -(weight_BT * gain_BT * mask_BT).sum() / mask_BT.sum()


def aipo_loss(current_BT, behavior_BT, advantages_B, mask_BT, *, rho=4.0):
    """Importance-weighted policy gradient, clipped on one side, arXiv:2505.24034."""
    weight_BT = (current_BT.detach() - behavior_BT).exp().clamp(max=rho)
    return -(weight_BT * advantages_B[:, None] * current_BT * mask_BT).sum() / mask_BT.sum()


LOSSES = {"grpo": (grpo_loss, "std"), "aipo": (aipo_loss, "none")}


def make_optimizer(model, lr, eps=1e-8):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)


def update(model, optimizer, kind, prompts_BP, tokens_BT, behavior_BT, mask_BT, rewards_B, *, temperature):
    """One optimizer step on one batch. Returns the loss."""
    loss_of, scale = LOSSES[kind]
    optimizer.zero_grad()
    current_BT = completion_logprobs(model, prompts_BP, tokens_BT, temperature)
    advantages_B = advantages(rewards_B, GROUP_SIZE, scale)
    loss = loss_of(current_BT, behavior_BT, advantages_B, mask_BT)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(kind: str, steps: int, seed: int = 0) -> list[float]:
    """Returns the mean reward of every step."""
    model, history = make_model(seed), []
    optimizer = make_optimizer(model, lr=3e-3)
    for _ in range(steps):
        prompts_BP = torch.randint(0, DIGITS, (PROMPTS, 1)).repeat_interleave(GROUP_SIZE, dim=0)
        tokens_BT, behavior_BT = sample(model, prompts_BP, MAX_TOKENS, TEMPERATURE)
        rewards_B = (tokens_BT == prompts_BP).double().mean(1)
        mask_BT = torch.ones_like(behavior_BT)  # every token was sampled by the model
        batch = (prompts_BP, tokens_BT, behavior_BT, mask_BT, rewards_B.float())
        update(model, optimizer, kind, *batch, temperature=TEMPERATURE)
        history.append(rewards_B.mean().item())
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model is slower on more
    for kind in LOSSES:
        history = train(kind, steps=120)
        print(f"{kind}: reward {history[0]:.2f} -> {sum(history[-10:]) / 10:.2f}")

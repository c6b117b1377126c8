"""What SGLang 0.5.23 says over HTTP, for doubles of it. No SGLang has any part in this.

Written from the source in `sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl`, under `sglang/srt`:

routes           `entrypoints/http_server.py`: `model_info`, `server_info`, `serve_generate_request`,
                 `flush_cache`, `update_weights_from_disk`, `update_weight_version`, `pause_generation`,
                 `continue_generation`
parts            `managers/tokenizer_manager.py`: `_handle_batch_output` with incremental streams,
                 `convert_logprob_style`, `_handle_abort_req` (which repeats tokens)
ends             `managers/schedule_batch.py`: `FINISH_ABORT`, `FINISH_LENGTH`, `FINISH_MATCHED_TOKEN`
labels           `utils/weight_versions.py`: `add_weight_versions_to_meta_info`
log-probs        `managers/scheduler_components/logprob_result_processor.py`: none for the first of a prompt,
                 whose last token of the vocabulary is called 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Protocol

from http_double import JsonHandler, Part

RELEASE = "0.5.23"


class Served(Protocol):
    """What a double does. `settings`: of `/server_info`."""

    label: str
    vocab: int
    settings: dict[str, Any]

    def sample(self, given: dict[str, Any]) -> Iterator[Part]:
        """The parts of a request, until its end. Closed when the client has gone away."""

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of all tokens but the first."""

    def top_logprob(self, given: dict[str, Any]) -> float:
        """Of the likeliest token after a prompt."""

    def load(self, directory: str) -> str:
        """Load weights. Returns the error in words, if there is one."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def check_idle(self) -> bool:
        """Whether no request is left."""


def settings(**changed: Any) -> dict[str, Any]:
    """Of a server that lacks nothing. SGLang tells some 500 more."""
    decodes = changed.pop("decodes", 9)
    return {
        "version": RELEASE,
        "dtype": "float32",
        "device": "cpu",
        "max_total_num_tokens": 160,
        "max_req_input_len": 64,
        "incremental_streaming_output": True,
        "enable_deterministic_inference": True,
        "speculative_algorithm": None,
        "internal_states": [{"effective_max_running_requests_per_dp": decodes}],
    } | changed


class SglangHandler(JsonHandler):
    served: Served
    rids = count()

    def take(self, path: str, given: dict[str, Any]) -> None:
        served = self.served
        match path:
            case "/model_info":
                self.answer({"model_path": "model", "weight_version": served.label})
            case "/server_info":
                self.answer(served.settings)
            case "/health":
                self.answer(b"")
            case "/pause_generation":
                assert given["mode"] == "abort"
                served.pause()
                self.answer({"message": "Generation paused successfully.", "status": "ok"})
            case "/continue_generation":
                served.resume()
                self.answer({"message": "Generation continued successfully.", "status": "ok"})
            case "/flush_cache":
                idle = served.check_idle()
                self.answer(b"Cache flushed.\n" if idle else b"Timed out.", 200 if idle else 400)
            case "/update_weights_from_disk":
                self._load(given)
            case "/update_weight_version":
                served.label = given["new_version"]
                self.answer({"success": True, "new_version": served.label})
            case "/generate" if given.get("stream"):
                self._stream(given)
            case "/generate":
                self.answer(self._generated(given))
            case _:
                self.answer({"detail": "Not Found"}, 404)

    def _load(self, given: dict[str, Any]) -> None:
        assert given["load_format"] == "safetensors"
        error = self.served.load(given["model_path"])
        if not error:
            self.served.label = given["weight_version"]
        message = (
            error or f"Succeeded to update model weights. Weight version updated to {self.served.label}."
        )
        content = {"success": not error, "message": message, "num_paused_requests": 0}
        self.answer(content, 400 if error else 200)

    def _generated(self, given: dict[str, Any]) -> dict[str, Any]:
        """Of one token."""
        tokens = given["input_ids"]
        meta = {"finish_reason": _reason("length", 1, 0), "weight_version": self.served.label}
        if given.get("logprob_start_len") == 0:
            logprobs = [None, *map(_number, self.served.logprobs(tokens))]
            meta["input_token_logprobs"] = [
                [logprob, token if token < self.served.vocab - 1 else 0, None]
                for logprob, token in zip(logprobs, tokens, strict=True)
            ]
        if given.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [[[_number(self.served.top_logprob(given)), tokens[0], None]]]
        return {"text": "", "output_ids": [0], "meta_info": meta}

    def _stream(self, given: dict[str, Any]) -> None:
        assert given["return_logprob"] and "extra_key" in given
        parts = self.served.sample(given)
        self.ended = False
        try:
            self.stream(self._said(given, parts))
            if self.ended:
                self.end_stream(done=True)
            else:
                self.broken()
        except OSError:
            self.close_connection = True
        finally:
            parts.close()  # type: ignore[attr-defined]

    def broken(self) -> None:
        """A stream without an end."""
        self.end_stream(done=False)

    def _said(self, given: dict[str, Any], parts: Iterator[Part]) -> Iterator[dict[str, Any]]:
        rid, sent = f"{next(self.rids):032x}", []
        for tokens, reason in parts:
            rows = [[_number(logprob), token, None] for token, logprob in tokens]
            sent += rows
            self.ended = reason is not None
            if reason == "abort" and not rows:
                rows = sent  # of a request that waits: everything again
            yield {
                "text": "",
                "output_ids": [row[1] for row in (rows[-1:] if reason == "abort" else rows)],
                "meta_info": {
                    "id": rid,
                    "finish_reason": reason and _reason(reason, len(sent), sent[-1][1] if sent else 0),
                    "prompt_tokens": len(given["input_ids"]),
                    "weight_version": self.served.label,
                    "num_retractions": 0,
                    "input_token_logprobs": [],
                    "output_token_logprobs": rows,
                    "output_token_logprobs_length": len(sent),
                    "completion_tokens": len(sent),
                    **(self._spans(len(sent)) if reason else {}),
                },
            }

    def _spans(self, length: int) -> dict[str, Any]:
        return {"weight_versions": [{"version": self.served.label, "start": 0, "end": length}]}


def _reason(reason: str, length: int, token: int) -> dict[str, Any]:
    return {
        "length": {"type": "length", "length": length},
        "stop": {"type": "stop", "matched": token},
        "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    }[reason]


def _number(logprob: float) -> float | None:
    """orjson writes what is not finite as null."""
    return logprob if math.isfinite(logprob) else None

"""Speaks SGLang's HTTP format as recorded from a real server, so that the client runs without a GPU.

It answers /generate with tokens counted up from the last prompt token, log-probs of -token/1000 and routes that show
the token's position. A file `die` beside the model makes it exit in the middle of the next /generate, once;
`die-in-push` in the next weight update. `drop` names tensors that its loader loses without a word.

Weights are real: a model that holds them as SGLang does, filled from the folder, updated through our loader from memory
that it shares with the pusher, or from a broadcast. Tensor parallel ranks are models in this one process.
"""

import argparse
import base64
import importlib
import io
import json
import os
import pickle
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

STATE = {"version": "0", "paused": False, "memory": ["kv_cache", "weights"], "models": [], "group": None}
LOG: list[str] = []  # calls that concern weights, in order


def models(folder: Path, ranks: int) -> list:
    """The ranks' models, filled from the folder when first asked for: torch takes seconds to import."""
    if not STATE["models"]:
        from fused_model import FusedModel
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors")
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        made = [FusedModel(shapes, rank=rank, ranks=ranks, mtp_from=layers) for rank in range(ranks)]
        for model in made:
            model.load_weights(tensors.items())
        STATE["models"] = made
    return STATE["models"]


class Unpickler(pickle.Unpickler):
    """SGLang's reads these modules and no others (srt/utils/common.py, SafeUnpickler), of which we use some."""

    def find_class(self, module: str, name: str) -> object:
        assert f"{module}.".startswith(("builtins.", "collections.", "copyreg.", "torch.")), f"{module}.{name}"
        return super().find_class(module, name)


def from_tensor(body: dict, held: list, loader: str) -> None:
    assert body["load_format"] == loader, body["load_format"]
    module, _, name = loader.rpartition(".")
    call = getattr(importlib.import_module(module), name)
    for model, handle in zip(held, body["serialized_named_tensors"], strict=True):
        named = Unpickler(io.BytesIO(base64.b64decode(handle, validate=True))).load()
        call(model, [(name, tensor.to("cpu")) for name, tensor in named])  # to its own device, as SGLang does


def join(body: dict) -> None:
    from miles_core.weight_sync.broadcast import open_group

    assert body["group_name"] == "miles_weights"
    STATE["group"] = open_group(
        body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], body["backend"]
    )


def leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group(STATE["group"])
    STATE["group"] = None


def from_broadcast(body: dict, held: list) -> None:
    """As SGLang lays it out: the tensors' bytes end to end in the order of their names."""
    import torch
    import torch.distributed as dist

    assert body["load_format"] == "flattened_bucket"
    dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
    sizes = [torch.Size(shape).numel() * d.itemsize for shape, d in zip(body["shapes"], dtypes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=STATE["group"])
    parts = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
    held[0].load_weights([(name, part.view(dtype).view(shape)) for name, part, dtype, shape in parts])


def answer(ids: list[int], params: dict, rid: str, routes: bool, config: dict) -> dict:
    new = [ids[-1] + 1 + i for i in range(params["max_new_tokens"])]
    reason = {"type": "length", "length": len(new)}
    for position, token in enumerate(new):
        if token in params["stop_token_ids"]:
            new, reason = new[: position + 1], {"type": "stop", "matched": token}
            break
    meta = {
        "id": rid,
        "finish_reason": reason,
        "weight_version": STATE["version"],
        "completion_tokens": len(new),
        "output_token_logprobs": [[-token / 1000, token, None] for token in new],
    }
    if routes:
        # A real server gives one row more when it ends on a stop token.
        rows = len(ids) + len(new) - 1 + (reason["type"] == "stop")
        shape = (rows, config["num_hidden_layers"], config["num_experts_per_tok"])
        table = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None, None], shape)
        meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(table).tobytes()).decode()
    return {"text": "", "output_ids": new, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.weights(body)
            return
        if STATE["paused"] or len(STATE["memory"]) < 2:
            self.reply(400, {"error": {"message": f"asked while {STATE}"}})
            return
        trigger = self.server.model / "die"
        if trigger.exists():
            trigger.unlink()
            os._exit(1)
        if any(p["max_new_tokens"] > 100 for p in body["sampling_params"]):
            self.reply(400, {"error": {"message": "Requested token count exceeds the model's maximum context length"}})
            return
        config = json.loads((self.server.model / "config.json").read_text())
        rows = zip(body["input_ids"], body["sampling_params"], body["rid"], strict=True)
        self.reply(200, [answer(*row, body["return_routed_experts"], config) for row in rows])

    def weights(self, body: dict) -> None:
        LOG.append(self.path)
        trigger = self.server.model / "die-in-push"
        if "update_weights" in self.path:
            if trigger.exists():
                trigger.unlink()
                os._exit(1)
            held = models(self.server.model, self.server.ranks)
            dropped = self.server.model / "drop"
            for model in held:
                model.skips = set(dropped.read_text().split()) if dropped.exists() else set()
            if self.path.endswith("_tensor"):
                from_tensor(body, held, self.server.loader)
            else:
                from_broadcast(body, held)
            if body["flush_cache"]:
                assert STATE["paused"] and body["weight_version"]
                STATE["version"] = body["weight_version"]
        elif self.path == "/init_weights_update_group":
            join(body)
        elif self.path == "/destroy_weights_update_group":
            leave()
        elif self.path == "/release_memory_occupation":
            STATE["memory"] = [tag for tag in STATE["memory"] if tag not in body["tags"]]
        elif self.path == "/resume_memory_occupation":
            STATE["memory"] += body["tags"]
        elif self.path == "/pause_generation":
            STATE["paused"] = True
        elif self.path == "/continue_generation":
            STATE["paused"] = False
        elif self.path == "/log":
            self.reply(200, LOG[:-1])
            return
        self.reply(200, {"success": True})

    def reply(self, status: int, value: object) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--fail-at-start", action="store_true")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--custom-weight-loader")
    arguments, _ = parser.parse_known_args()
    if arguments.fail_at_start:
        raise SystemExit("ValueError: unknown attention backend")
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.model, server.ranks, server.loader = arguments.model_path, arguments.tp_size, arguments.custom_weight_loader
    server.serve_forever()

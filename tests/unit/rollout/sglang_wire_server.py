"""Speaks SGLang's HTTP format as recorded from a real server, so that the client runs without a GPU.

It answers /generate with tokens counted up from the last prompt token, log-probs of -token/1000 and routes that show
the token's position. A file `die` beside the model makes it exit in the middle of the next /generate, once.
"""

import argparse
import base64
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

STATE = {"version": "0"}


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
            self.reply(200, {"success": True})
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
    arguments, _ = parser.parse_known_args()
    if arguments.fail_at_start:
        raise SystemExit("ValueError: unknown attention backend")
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.model = arguments.model_path
    server.serve_forever()

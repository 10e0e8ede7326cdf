"""The decoder whose results do not depend on what a token is batched with; trainer.exact gives the same bits.

Weights, their names and loading are the Decoder's. Each step is computed by miles_core/exact/, in the order in which
the trainer's layers compute it, so that the two agree in every bit and not only in most digits.
"""

from functools import partial

import torch
import torch.nn.functional as F

from conversion.families.family import HfNames
from conversion.geometry import ModelGeometry
from miles_core.exact import functions as exact
from miles_core.exact.sums import WholeRows
from miles_core.rollout.embedded.attention import GroupedQueryAttention
from miles_core.rollout.embedded.blocks import Mlp, RmsNorm
from miles_core.rollout.embedded.decoder import Decoder, DecoderLayer
from miles_core.rollout.embedded.forward_pass import ForwardPass
from miles_core.rollout.embedded.moe import MixtureOfExperts


class ExactDecoder(Decoder):
    """See `Decoder`. No latent attention: it multiplies here in another order than in training."""

    def __init__(self, g: ModelGeometry, names: HfNames, dtype: torch.dtype, device: torch.device) -> None:
        if g.mla is not None:
            raise ValueError(f"{g.architecture}: trainer.exact=true has no latent attention; set trainer.exact=false")
        exact.check_this_machine()
        super().__init__(g, names, dtype, device)
        self.attention = partial(exact.attention, max_length=g.max_position)
        self._weights = _WeightRows()

    def forward(self, token_ids: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        x = F.embedding(token_ids, self.embedding) * self.embedding_scale
        for layer in self.layers:
            x = self._layer(layer, x, step)
        return self._norm(self.final_norm, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = exact.linear(hidden, self._weights.of(self.head), dtype=torch.float32)
        cap = self.geometry.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def log_softmax(self, logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
        return exact.log_softmax(logits.float() / temperature)

    def _layer(self, layer: DecoderLayer, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        assert isinstance(layer.attention, GroupedQueryAttention)
        out = self._attention(layer.attention, self._norm(layer.pre_attention_norm, x), step)
        x = x + (out if layer.post_attention_norm is None else self._norm(layer.post_attention_norm, out))
        normed = self._norm(layer.pre_mlp_norm, x)
        if layer.moe is not None:
            out, experts = self._moe(layer.moe, normed)
            step.routes.append(experts)
        elif layer.mlp is not None:
            out = self._mlp(layer.mlp, normed)
        return x + (out if layer.post_mlp_norm is None else self._norm(layer.post_mlp_norm, out))

    def _attention(self, a: GroupedQueryAttention, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        qkv = exact.linear(x, self._weights.of(a.qkv), a.qkv_bias)
        if a.full_norms:
            q, k, v = qkv.split(a.widths, dim=-1)
            qkv = torch.cat([self._norm(a.full_norms[0], q), self._norm(a.full_norms[1], k), v], dim=-1)
        qk, v = qkv.unflatten(-1, (-1, a.head_dim)).tensor_split([a.heads[0] + a.heads[1]], dim=1)
        if a.head_norm is not None:
            qk = self._norm(a.head_norm, qk)
        q, k = step.rotation(a.layer).exact(qk).tensor_split([a.heads[0]], dim=1)
        return exact.linear(step.attend(a.layer, q, k, v, a.scale), self._weights.of(a.out), a.out_bias)

    def _mlp(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        hidden = self._gated(exact.linear(x, self._weights.of(mlp.gate_up), mlp.gate_up_bias))
        return exact.linear(hidden, self._weights.of(mlp.down), mlp.down_bias)

    def _moe(self, moe: MixtureOfExperts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = exact.linear(x.float(), self._weights.of(moe.router.weight))
        _, experts = moe.router.choose(logits, exact.sigmoid)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
        weights = exact.gate(logits, chosen, moe.moe)
        out = torch.zeros_like(x)
        for expert in chosen.any(0).nonzero().flatten().tolist():  # added up in their order, as in training
            rows = chosen[:, expert].nonzero().flatten()
            hidden = self._gated(exact.linear(x[rows], self._weights.of(moe.gate_up, expert)))
            hidden = (hidden * weights[rows, expert].unsqueeze(-1)).to(x.dtype)
            out.index_add_(0, rows, exact.linear(hidden, self._weights.of(moe.down.mT, expert)))
        return out if moe.shared is None else out + self._mlp(moe.shared, x), experts

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return exact.activation(self.geometry.activation, gate) * up

    @staticmethod
    def _norm(norm: RmsNorm, x: torch.Tensor) -> torch.Tensor:
        return exact.rms_norm(x, norm.weight, norm.eps, plus_one=norm.plus_one)


class _WeightRows:
    """Matrices as `exact.linear` takes them, made again when one has been written to (torch counts that)."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[int, WholeRows]] = {}

    def of(self, weight: torch.Tensor, index: int | None = None) -> WholeRows:
        """Of `weight`, or of matrix `index` of a stack. The storage must live as long as this object."""
        key = (weight.data_ptr(), -1 if index is None else index)
        found = self._made.get(key)
        if found is None or found[0] != weight._version:
            found = (weight._version, exact.weight_rows(weight if index is None else weight[index]))
            self._made[key] = found
        return found[1]

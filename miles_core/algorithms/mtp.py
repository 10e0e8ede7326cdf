"""Loss and metrics of multi-token prediction: a small draft head learns what the model itself goes on to say.

The head at `depth` (1 is the first) predicts a response token from the state that lies `depth` places before the one
from which the main head predicts it: with the main head at t scoring token t + 1, token t + 1 + depth.
"""

from collections.abc import Mapping

from torch import Tensor

from miles_core.algorithms.masking import masked, weighted_sum

_PREFIX = "mtp:"  # of pieces that `finalize_mtp_metrics` takes


def mtp_objective(
    log_probs: Tensor, agrees: Tensor, trained: Tensor, loss_weights: Tensor, *, depth: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of one head on the response tokens of a micro-batch, and metrics.

    The weights are those of the policy loss, so that it too is the same however the batch is cut: losses, and the
    metrics (detached scalars), add up over micro-batches and ranks.

    Args:
        log_probs: fp32 [N], of each response token, with gradient.
        agrees: bool [N], the head's likeliest token is that of the main head. Its mean is what greedy speculative
            decoding accepts at this depth, given that all before was accepted.
        trained: bool [N], trainable, and the sequence reaches back far enough.
        loss_weights: fp32 [N].
        depth: of the head.
    """
    loss = -weighted_sum(log_probs, loss_weights, trained)
    piece = f"{_PREFIX}mtp_{depth}"
    metrics = {
        f"{piece}_loss": loss.detach(),
        f"{piece}_agreement": weighted_sum(agrees.float(), loss_weights, trained),
        f"{piece}_targets": trained.float().sum(),
        f"{piece}_weights": masked(loss_weights, trained).sum(),
    }
    return loss, metrics


def finalize_mtp_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`mtp_1_loss` and `mtp_1_agreement` (weighted means), `mtp_1_targets` (a count), and so on for every depth.

    A batch without targets (responses of one token to prompts of one) has means of 0.
    """
    pieces = {name.removeprefix(_PREFIX): value for name, value in sums.items() if name.startswith(_PREFIX)}
    final = {}
    for name, value in pieces.items():
        head, _, what = name.rpartition("_")
        if what == "targets":
            final[name] = value
        elif what != "weights":
            final[name] = value / (pieces[f"{head}_weights"] or 1.0)
    return final


def without_mtp(sums: Mapping[str, float]) -> dict[str, float]:
    """The pieces that are not of multi-token prediction."""
    return {name: value for name, value in sums.items() if not name.startswith(_PREFIX)}

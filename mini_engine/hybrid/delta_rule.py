"""Lesson 11. The gated delta rule (Yang et al., 2024, arXiv:2412.06464): a memory of fixed size.

A head's state S `[D_k, D_v]` maps keys to values. Each token lets it fade, reads the value stored for the token's key,
writes part of the difference to the token's value, and reads the state with the token's query:

    S = S * exp(g)                          g <= 0: how much is forgotten
    S = S + k (beta * (v - S^T k))^T        beta in 0 … 1: how much of the difference is written
    o = S^T q

`recurrent_step` does this for one token of each of S sequences; `chunk_scan` for many tokens of one sequence, with
matrix products instead of a loop over tokens. Both compute in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that one round of matrix products covers
L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """Return x with every vector along the last dimension normalized to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recurrent_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Advance each of S states by one token.

    Args:
        state: `[S, H, D_k, D_v]` float32.
        q, k: `[S, H, D_k]` float32, normalized; v: `[S, H, D_v]`; g, beta: `[S, H]`.

    Returns:
        the outputs `[S, H, D_v]` and the new states.
    """
    state = state * g.exp()[..., None, None]
    known = (state * k[..., None]).sum(-2)
    delta = (v - known) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2), state


def chunk_scan(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Advance one state by T tokens, in rounds of CHUNK tokens.

    Within a round the differences depend on one another through a triangular system; solving it gives all of them at
    once. Then the state takes one step per round.

    Args:
        state: `[H, D_k, D_v]` float32.
        q, k: `[T, H, D_k]` float32, normalized; v: `[T, H, D_v]`; g, beta: `[T, H]`.

    Returns:
        the outputs `[T, H, D_v]` and the state after the last token.
    """
    outputs = []
    for part in zip(*(x.split(CHUNK) for x in (q, k, v, g, beta)), strict=True):
        out, state = _round(state, *(x.transpose(0, 1) for x in part))
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


def _round(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Advance a state by up to CHUNK tokens. q, k `[H, T, D_k]`; v `[H, T, D_v]`; g, beta `[H, T]`."""
    faded = g.cumsum(-1)  # the logarithm of the share of the state left after each token
    between = (faded[:, :, None] - faded[:, None, :]).tril().exp().tril()  # the share of j's write left at token i
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT) * between
    start = k_beta * faded.exp()[..., None]  # how each token's key reads the state before the round
    wanted = v * beta[..., None] - start @ state
    delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * faded.exp()[..., None]) @ state + ((q @ k.mT) * between) @ delta
    left = (faded[:, -1:] - faded).exp()[..., None]
    return out, state * faded[:, -1].exp()[:, None, None] + (k * left).mT @ delta


def advance_conv(kept: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Append a step's inputs to the K - 1 inputs before them.

    Args:
        kept: `[..., C, K - 1]`, the latest input last; zeros before a text's first token.
        inputs: `[..., T, C]`.

    Returns:
        the window `[..., K - 1 + T, C]` that the convolution sees, and the last K - 1 inputs `[..., C, K - 1]`.
    """
    window = torch.cat((kept.mT, inputs), dim=-2)
    return window, window[..., inputs.shape[-2] :, :].mT


def causal_conv(window: Tensor, weight: Tensor) -> Tensor:
    """Return SiLU of the causal depthwise convolution; see `depthwise`."""
    return F.silu(depthwise(window, weight))


def depthwise(window: Tensor, weight: Tensor) -> Tensor:
    """Return the causal depthwise convolution, for every input that has K - 1 inputs before it.

    Args:
        window: `[..., K - 1 + T, C]`: the last K - 1 inputs before this step, then its T inputs.
        weight: `[C, K]`.

    Returns:
        `[..., T, C]` float32, whatever the dtypes, so that nothing is rounded before the delta rule reads it.
    """
    taps = weight.shape[1]
    count = window.shape[-2] - taps + 1
    inputs, weight = window.float(), weight.float()
    out = inputs[..., :count, :] * weight[:, 0]
    for i in range(1, taps):
        out = out + inputs[..., i : i + count, :] * weight[:, i]
    return out

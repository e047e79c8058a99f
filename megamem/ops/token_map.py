"""A linear map over the tokens of a chunk: each output token is a weighted sum of input tokens, whatever they hold."""

from __future__ import annotations

from torch import Tensor


def map_tokens(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Return out[t, c] = bias[t] + sum over s and k of weight[t, s, k] x[s, c + k], for each group of channels.

    With one group this is torch's `Conv1d` with tokens for channels, over x that has its padding already.

    Letters of shapes: T output tokens, S input tokens, B batch rows, G groups, C channels of a group, K kernel width.

    Args:
        weight: [G, T, S, K].
        bias: [G, T].
        x: [S, B, G, C + K - 1].
    Returns: [T, B, G, C].
    """
    groups, _, tokens, kernel = weight.shape
    rows, channels = x.shape[1], x.shape[-1] - kernel + 1
    if kernel == 1:
        weight, columns = weight.squeeze(-1), x.permute(2, 0, 1, 3)
    else:
        # as many shifted copies of x as the kernel is wide, so that the sum over tokens and shifts is one product
        weight, columns = weight.flatten(2), x.unfold(-1, channels, 1).permute(2, 0, 3, 1, 4)
    mapped = weight @ columns.reshape(groups, tokens * kernel, rows * channels) + bias[..., None]
    return mapped.unflatten(-1, (rows, channels)).permute(1, 2, 0, 3)

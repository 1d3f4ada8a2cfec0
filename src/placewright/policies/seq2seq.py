"""
The sequence-to-sequence Placer that both papers share: groups in, a device for each out.

An LSTM reads the groups' embeddings (in both directions for the Hierarchical Planner); another one
chooses devices, one group after the other. Its input is the embedding of the device chosen before.
At each step it attends to all groups (Bahdanau et al.): scores ``v . tanh(W1 e + W2 h)``, whose
softmax weighs the ``W1 e``; the sum, beside the hidden state, gives the devices' scores.

This module owns the networks and their gradients; the loops are in `placewright.policies._kernels`.

Letters: ``M`` groupings, ``K`` placements for each, ``B`` their product, ``G`` groups, ``D``
devices, ``H`` hidden size, ``E`` size of a group's embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placewright.policies import _kernels


@dataclass(frozen=True, eq=False)
class Shaping:
    """How scores become chances: divided by a temperature, bounded by a tanh, with some noise."""

    temperature: float = 1.0
    tanh_constant: float = 0.0  # 0: not bounded
    noise: float = 0.0  # standard deviation, as a share of the logits' root mean square

    def logits(self, scores: Tensor) -> Tensor:
        """Shape scores."""
        logits = scores / self.temperature
        return self.tanh_constant * torch.tanh(logits) if self.tanh_constant else logits


@dataclass(frozen=True, eq=False)
class Groups:
    """What the Placer is given: groups as it sees them, and where they may go."""

    lengths: NDArray[np.int64]  # [M] how many groups there are; what lies beyond is padding
    embedding: Tensor  # [M, G, E]
    allowed: NDArray[np.bool_]  # [M, G, D]
    needs_bytes: NDArray[np.float64]  # [M, G] what placing one takes of a device's memory
    lean: NDArray[np.float32] | None = None  # [M, G, D] what is added to the devices' scores
    follow: float = 0.0  # what is added to the score of the device chosen before


@dataclass(frozen=True, eq=False)
class Limits:
    """What keeps devices from being chosen: memory, and equal ones that come before."""

    capacity_bytes: NDArray[np.float64]  # [D]
    twin_of: NDArray[np.int64]  # [D] an equal device that must be taken first; -1 for none

    @classmethod
    def none(cls, num_devices: int) -> Limits:
        """Give no limits."""
        return cls(np.full(num_devices, np.inf), np.full(num_devices, -1))


@dataclass(frozen=True, eq=False)
class Choice:
    """Sampled devices, with how likely they were."""

    devices: NDArray[np.int64]  # [B, G]
    log_chance: Tensor  # [B, G] of each device
    entropy: Tensor  # [B] mean over groups


def glorot(*shape: int) -> nn.Parameter:
    """Make weights, uniform in Glorot's bounds."""
    bound = math.sqrt(6.0 / (shape[-2] + shape[-1]))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Placer(nn.Module):
    """
    Reads groups and chooses a device for each.

    Parameters
    ----------
    size
        Of a group's embedding.
    hidden
        Of the decoder, and of the encoder, both directions together.
    devices
        Features of each device ([D, F]) if their embeddings are to be computed from them;
        otherwise their number, and each device has an embedding of its own.
    is_bidirectional
        Whether the encoder reads the groups in both directions.
    is_aligned
        Whether the decoder sees the group that it places, not through attention alone.
    """

    def __init__(
        self,
        size: int,
        hidden: int,
        devices: int | Tensor,
        is_bidirectional: bool = True,
        is_aligned: bool = False,
    ) -> None:
        super().__init__()
        ways = 2 if is_bidirectional else 1
        each = hidden // ways
        self.num_devices = devices if isinstance(devices, int) else len(devices)
        self.read = glorot(ways, size, 4 * each)
        self.read_bias = _bias(ways, each)
        self.read_again = glorot(ways, each, 4 * each)
        self.to_keys = glorot(hidden, hidden)  # W1
        self.to_query = glorot(hidden, hidden)  # W2
        self.weight = nn.Parameter(glorot(hidden, 1).detach()[:, 0].contiguous())  # v
        self.recurrent = glorot(hidden, 4 * hidden)
        self.gates = glorot(hidden, 4 * hidden)
        self.gates_bias = _bias(1, hidden)
        self.go = nn.Parameter(glorot(1, hidden).detach())
        self.align = glorot(hidden, 4 * hidden) if is_aligned else None
        if isinstance(devices, int):
            self.device_features = None
            self.embed = glorot(devices, hidden)
            self.to_scores = glorot(2 * hidden, devices)
        else:
            self.register_buffer("device_features", devices, persistent=False)
            self.embed = glorot(devices.shape[1], hidden)
            self.to_scores = glorot(2 * hidden, devices.shape[1])

    def encode(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Give each group's code [M, G, H], and the last hidden and cell states [M, 2, H]."""
        count, length, _ = groups.embedding.shape
        ways = len(self.read)
        sequences = [groups.embedding]
        if ways == 2:
            back = torch.from_numpy(_reversed(groups.lengths, length))
            sequences.append(groups.embedding.gather(1, back[..., None].expand_as(sequences[0])))
        inputs = torch.stack(
            [x @ w + b for x, w, b in zip(sequences, self.read, self.read_bias, strict=True)]
        )
        lengths = np.tile(groups.lengths, ways)
        hidden, last = _Unroll.apply(inputs.flatten(0, 1), self.read_again, lengths)
        hidden = hidden.unflatten(0, (ways, count))
        last = last.unflatten(0, (ways, count))  # [ways, M, 2, H / ways]
        parts = [hidden[0]]
        if ways == 2:
            parts.append(hidden[1].gather(1, back[..., None].expand_as(hidden[1])))
        return torch.cat(parts, dim=-1), torch.cat([*last], dim=-1)

    def sample(
        self,
        groups: Groups,
        num_placements: int,
        shaping: Shaping,
        limits: Limits,
        random: np.random.Generator,
        forced: NDArray[np.int64] | None = None,  # [B, G]
    ) -> Choice:
        """
        Choose devices for the groups, `num_placements` times for each grouping.

        With `forced`, those are chosen, and it is told how likely they were.
        """
        code, state = self.encode(groups)
        _, length, _ = code.shape
        count = len(groups.lengths) * num_placements
        drawn = _Drawn(
            lengths=groups.lengths,
            uniform=random.random((count, length), dtype=np.float32),
            noise=_noise(random, shaping.noise, (count, length, self.num_devices)),
            shaping=shaping,
            allowed=groups.allowed,
            needs_bytes=groups.needs_bytes,
            lean=np.zeros(groups.allowed.shape, np.float32) if groups.lean is None else groups.lean,
            follow=np.full(len(groups.lengths), groups.follow, dtype=np.float32),
            limits=limits,
            forced=np.full((1, length), -1) if forced is None else forced,
        )
        embed, to_scores = self.embed, self.to_scores
        if self.device_features is not None:
            embed = self.device_features @ embed
            to_scores = to_scores @ self.device_features.T
        inputs = torch.cat([embed, self.go]) @ self.gates + self.gates_bias
        aligned = code.new_zeros(*code.shape[:2], 4 * code.shape[2])
        if self.align is not None:
            aligned = code @ self.align
        scores = _Decode.apply(
            code @ self.to_keys,
            aligned,
            inputs,
            self.recurrent,
            state,
            self.to_query,
            self.weight,
            to_scores,
            drawn,
        )
        return _choice(scores, drawn, shaping, np.repeat(groups.lengths, num_placements))


def _bias(ways: int, hidden: int) -> nn.Parameter:
    """Make the gates' biases: 1 for the forget gate, 0 for the others."""
    bias = torch.zeros(ways, 4 * hidden)
    bias[:, hidden : 2 * hidden] = 1.0
    return nn.Parameter(bias)


def _reversed(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:  # [M, size]
    """Give the order in which each sequence runs backwards, its padding left where it is."""
    steps = np.arange(size)[None]
    return np.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)


def _noise(
    random: np.random.Generator, rate: float, shape: tuple[int, int, int]
) -> NDArray[np.float32]:
    if rate:
        return random.standard_normal(shape, dtype=np.float32)
    return np.zeros((1, *shape[1:]), dtype=np.float32)


@dataclass(eq=False)
class _Drawn:
    """What `_Decode` is given besides weights, and what it found besides scores."""

    lengths: NDArray[np.int64]  # [M]
    uniform: NDArray[np.float32]  # [B, G]
    noise: NDArray[np.float32]  # [B, G, D]
    shaping: Shaping
    allowed: NDArray[np.bool_]  # [M, G, D]
    needs_bytes: NDArray[np.float64]  # [M, G]
    lean: NDArray[np.float32]  # [M, G, D]
    follow: NDArray[np.float32]  # [M]
    limits: Limits
    forced: NDArray[np.int64]  # [B, G] or [1, G] of -1
    devices: NDArray[np.int64] | None = None  # [B, G]
    legal: NDArray[np.bool_] | None = None  # [B, G, D]
    added: NDArray[np.float32] | None = None  # [B, G, D]


def _choice(scores: Tensor, drawn: _Drawn, shaping: Shaping, lengths: NDArray[np.int64]) -> Choice:
    """Tell how likely the devices were that were drawn."""
    assert drawn.devices is not None
    assert drawn.legal is not None
    assert drawn.added is not None
    logits = shaping.logits(scores)
    if shaping.noise:
        logits = logits + torch.from_numpy(drawn.added)
    logits = logits.masked_fill(torch.from_numpy(~drawn.legal), -1e9)
    chances = logits.log_softmax(dim=-1)
    is_real = torch.from_numpy(np.arange(scores.shape[1])[None] < lengths[:, None])
    chosen = chances.gather(2, torch.from_numpy(drawn.devices)[..., None])[..., 0]
    entropy = -(chances.exp() * chances).sum(dim=-1)
    count = torch.from_numpy(lengths)
    return Choice(
        drawn.devices,
        torch.where(is_real, chosen, 0.0),
        torch.where(is_real, entropy, 0.0).sum(dim=1) / count,
    )


class _Unroll(torch.autograd.Function):
    """An LSTM over sequences whose inputs are already gates; gives hidden and last states."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, recurrent: Tensor, lengths: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        rows, steps, width = inputs.shape
        weights = _array(recurrent)
        hidden = np.zeros((rows, steps, width // 4), dtype=np.float32)
        cells = np.zeros_like(hidden)
        gates = np.zeros((rows, steps, width), dtype=np.float32)
        _kernels.unroll(lengths, _array(inputs), weights, hidden, cells, gates)
        ctx.kept = lengths, weights, hidden, cells, gates
        each = np.arange(rows)
        last = np.stack([hidden[each, lengths - 1], cells[each, lengths - 1]], axis=1)
        return torch.from_numpy(hidden), torch.from_numpy(last)

    @staticmethod
    def backward(ctx: Any, hidden_slopes: Tensor, last_slopes: Tensor) -> Any:
        lengths, weights, hidden, cells, gates = ctx.kept
        rows, _, size = hidden.shape
        slopes = _array(hidden_slopes).copy()
        last = _array(last_slopes)
        slopes[np.arange(rows), lengths - 1] += last[:, 0]
        gate_slopes = np.zeros_like(gates)
        first = np.zeros((rows, size), dtype=np.float32)
        _kernels.unroll_back(
            lengths,
            weights,
            first,
            cells,
            gates,
            slopes,
            gate_slopes,
            np.zeros_like(first),
            last[:, 1].copy(),
        )
        before = np.concatenate([first[:, None], hidden[:, :-1]], axis=1)
        ways = len(weights)
        by_weights = _products(before, gate_slopes, ways)
        return torch.from_numpy(gate_slopes), by_weights, None


class _Decode(torch.autograd.Function):
    """Chooses devices one group after the other; gives the scores they were chosen by."""

    @staticmethod
    def forward(
        ctx: Any,
        keys: Tensor,
        aligned: Tensor,
        inputs: Tensor,
        recurrent: Tensor,
        state: Tensor,
        to_query: Tensor,
        weight: Tensor,
        to_scores: Tensor,
        drawn: _Drawn,
    ) -> Tensor:
        weights = [*map(_array, (keys, aligned, inputs, recurrent, state))]
        weights += [*map(_array, (to_query, weight, to_scores))]
        count, steps = drawn.uniform.shape
        size, devices = len(recurrent), to_scores.shape[1]
        drawn.devices = np.zeros((count, steps), dtype=np.int64)
        drawn.legal = np.ones((count, steps, devices), dtype=np.bool_)
        drawn.added = np.zeros_like(drawn.noise)
        scores = np.zeros((count, steps, devices), dtype=np.float32)
        hidden, cells, queries, context = np.zeros((4, count, steps, size), dtype=np.float32)
        gates = np.zeros((count, steps, 4 * size), dtype=np.float32)
        attention = np.zeros((count, steps, steps), dtype=np.float32)
        decode: Any = _kernels.decode  # numba's types stop short of so many arguments
        decode(
            drawn.lengths,
            *weights,
            drawn.uniform,
            np.float32(drawn.shaping.temperature),
            np.float32(drawn.shaping.tanh_constant),
            drawn.noise,
            np.float32(drawn.shaping.noise),
            drawn.allowed,
            drawn.lean,
            drawn.follow,
            drawn.needs_bytes,
            drawn.limits.capacity_bytes,
            drawn.limits.twin_of,
            drawn.forced,
            drawn.devices,
            scores,
            drawn.legal,
            drawn.added,
            hidden,
            cells,
            gates,
            queries,
            attention,
            context,
        )
        ctx.kept = drawn, weights, hidden, cells, gates, queries, attention, context
        return torch.from_numpy(scores)

    @staticmethod
    def backward(ctx: Any, score_slopes: Tensor) -> Any:
        drawn, weights, hidden, cells, gates, queries, attention, context = ctx.kept
        keys, _, inputs, recurrent, state, to_query, weight, to_scores = weights
        lengths = drawn.lengths
        num_groupings, steps, size = keys.shape
        each = len(hidden) // num_groupings
        slopes, steep = score_slopes.contiguous(), torch.from_numpy(to_scores)
        flat = slopes.flatten(0, 1)
        seen = torch.from_numpy(np.concatenate([hidden, context], axis=2)).flatten(0, 1)
        by_to_scores = seen.T @ flat
        hidden_slopes = slopes @ steep[:size].T
        context_slopes = slopes @ steep[size:].T
        # Attention: the sum over keys, its softmax, then the scores of keys.
        weigh = torch.from_numpy(attention).view(num_groupings, each * steps, steps)
        by_context = context_slopes.view(num_groupings, each * steps, size)
        by_weigh = by_context @ torch.from_numpy(keys).transpose(1, 2)
        by_weigh -= (weigh * by_weigh).sum(dim=2, keepdim=True)
        by_weigh *= weigh
        parts = num_groupings * max(1, _kernels.SLICES // num_groupings)
        key_slopes = np.zeros((parts, steps, size), dtype=np.float32)
        weight_slopes = np.zeros((parts, size), dtype=np.float32)
        query_slopes = np.zeros_like(queries)
        _kernels.attention_gradients(
            lengths,
            keys,
            queries,
            weight,
            by_weigh.numpy().reshape(attention.shape),
            key_slopes,
            query_slopes,
            weight_slopes,
        )
        by_keys = torch.from_numpy(key_slopes).view(num_groupings, -1, steps, size).sum(dim=1)
        by_keys += weigh.transpose(1, 2) @ by_context
        by_queries = torch.from_numpy(query_slopes).flatten(0, 1)
        hidden_slopes += (by_queries @ torch.from_numpy(to_query).T).view_as(hidden_slopes)
        by_to_query = seen[:, :size].T @ by_queries
        # The LSTM.
        first = np.repeat(state, each, axis=0)  # [B, 2, H]
        gate_slopes = np.zeros_like(gates)
        by_first = np.zeros((2, len(hidden), size), dtype=np.float32)
        _kernels.unroll_back(
            np.repeat(lengths, each),
            recurrent[None],
            np.ascontiguousarray(first[:, 1]),
            cells,
            gates,
            hidden_slopes.numpy(),
            gate_slopes,
            by_first[0],
            by_first[1],
        )
        before = np.concatenate([first[:, :1], hidden[:, :-1]], axis=1)
        by_aligned = gate_slopes.reshape(num_groupings, each, steps, 4 * size).sum(axis=1)
        by_state = by_first.reshape(2, num_groupings, each, size).sum(axis=2)
        found = (
            by_keys,
            by_aligned,
            _by_device(drawn.devices, gate_slopes, len(inputs)),
            _products(before, gate_slopes, 1)[0],
            by_state.transpose(1, 0, 2),
            by_to_query,
            weight_slopes.sum(axis=0),
            by_to_scores,
        )
        return *(torch.as_tensor(array) for array in found), None


def _array(tensor: Tensor) -> NDArray[Any]:
    return np.asarray(tensor.detach().contiguous().numpy())


def _products(before: NDArray[Any], slopes: NDArray[Any], ways: int) -> Tensor:
    """Give the recurrent weights' gradient, for each of several directions."""
    left = torch.from_numpy(before.reshape(ways, -1, before.shape[2]))
    right = torch.from_numpy(slopes.reshape(ways, -1, slopes.shape[2]))
    return left.transpose(1, 2) @ right


def _by_device(devices: NDArray[np.int64], slopes: NDArray[Any], count: int) -> NDArray[Any]:
    """Sum the gates' gradients by the device that was chosen before; the last row is the first."""
    before = np.full_like(devices, count - 1)
    before[:, 1:] = devices[:, :-1]
    is_device = torch.nn.functional.one_hot(torch.from_numpy(before.reshape(-1)), count)
    flat = torch.from_numpy(slopes.reshape(-1, slopes.shape[2]))
    return np.asarray((is_device.float().T @ flat).numpy())

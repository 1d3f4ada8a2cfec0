"""
The papers' recurrent models, unrolled step by step: a language model and translation models.

Each LSTM layer is one module and each of its steps one call of it, so that a graph captured from
these has the papers' shape: layers times steps, open to wavefronts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LstmLayer(nn.Module):
    """One LSTM layer (Hochreiter and Schmidhuber, 1997), called once a step."""

    def __init__(self, num_inputs: int, num_units: int) -> None:
        super().__init__()
        self.num_units = num_units
        self.gates = nn.Linear(num_inputs + num_units, 4 * num_units)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Take one step: give the new output and cell."""
        output, cell = state
        gates = self.gates(torch.cat([x, output], 1))
        enter, forget, candidate, leave = gates.chunk(4, 1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
        return torch.sigmoid(leave) * torch.tanh(cell), cell

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make the state before the first step, for a batch as large as `like`."""
        zeros = like.new_zeros(like.shape[0], self.num_units)
        return zeros, zeros


def _run(layers: nn.ModuleList, steps: Sequence[Tensor]) -> list[Tensor]:
    """Run a stack of layers over a sequence: the last layer's outputs."""
    states = [layer.start(steps[0]) for layer in layers]  # type: ignore[operator]
    outputs = []
    for step in steps:
        x = step
        for k, layer in enumerate(layers):
            states[k] = layer(x, states[k])
            x = states[k][0]
        outputs.append(x)
    return outputs


class RnnLm(nn.Module):
    """
    A recurrent language model: embedding, LSTM layers, softmax (Jozefowicz et al., 2016).

    Takes tokens ``[batch, steps]`` and gives logits ``[batch * steps, vocabulary]``, all steps of
    one sequence together.
    """

    def __init__(self, num_layers: int, num_units: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, num_units)
        self.layers = nn.ModuleList(LstmLayer(num_units, num_units) for _ in range(num_layers))
        self.softmax = nn.Linear(num_units, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the next token at every step."""
        outputs = _run(self.layers, self.embedding(tokens).unbind(1))
        return self.softmax(torch.stack(outputs, 1).flatten(0, 1))


class Attention(nn.Module):
    """Additive attention over the encoder's outputs (Bahdanau et al., 2015)."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.query = nn.Linear(num_units, num_units, bias=False)
        self.key = nn.Linear(num_units, num_units, bias=False)
        self.score = nn.Linear(num_units, 1, bias=False)

    def forward(self, output: Tensor, memory: Tensor, keys: Tensor) -> Tensor:
        """Give the part of `memory` that `output` asks for."""
        scores = self.score(torch.tanh(self.query(output).unsqueeze(1) + keys)).squeeze(2)
        weights = torch.softmax(scores, 1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Nmt(nn.Module):
    """
    Translation with attention (Sutskever et al., 2014; Bahdanau et al., 2015; Wu et al., 2016).

    As many encoder as decoder layers; the first decoder layer's output asks the attention, and
    what that gives goes into every later layer and, at the next step, the first. Each decoder
    step has its own softmax, as in the papers' unrolled graphs. Takes source and target tokens
    ``[batch, steps]`` and gives logits, one ``[batch, vocabulary]`` a step.
    """

    def __init__(self, num_layers: int, num_units: int, vocabulary: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, num_units)
        self.target = nn.Embedding(vocabulary, num_units)
        self.encoder = nn.ModuleList(LstmLayer(num_units, num_units) for _ in range(num_layers))
        self.decoder = nn.ModuleList(LstmLayer(2 * num_units, num_units) for _ in range(num_layers))
        self.attention = Attention(num_units)
        self.softmax = nn.Linear(num_units, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Give the logits of the next target token at every step."""
        memory = torch.stack(_run(self.encoder, self.source(source).unbind(1)), 1)
        keys = self.attention.key(memory)
        steps = self.target(target).unbind(1)
        states = [layer.start(steps[0]) for layer in self.decoder]  # type: ignore[operator]
        context = torch.zeros_like(steps[0])
        logits = []
        for step in steps:
            x = step
            for k, layer in enumerate(self.decoder):
                states[k] = layer(torch.cat([x, context], 1), states[k])
                x = states[k][0]
                if k == 0:
                    context = self.attention(x, memory, keys)
            logits.append(self.softmax(x))
        return tuple(logits)

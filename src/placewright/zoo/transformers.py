"""Transformers: BERT, GPT-2, a Llama-shaped decoder, and a decoder with mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Multi-head self-attention, one projection for query, key and value (Vaswani et al., 2017)."""

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions."""
        q, k, v = (_split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, inner: int, approximate: str = "none") -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.gelu = nn.GELU(approximate)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        return self.down(self.gelu(self.up(x)))


class BertLayer(nn.Module):
    """An encoder layer that normalises after each half."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, is_causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.mlp = Mlp(width, 4 * width)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nn.Module):
    """
    BERT's encoder and pooler (Devlin et al., 2018); the base size has 109,482,240 parameters.

    `is_training_head` adds the masked-language-model head, tied to the word embedding, and gives
    logits ``[batch * length, vocabulary]`` instead of hidden states and the pooled first token.
    """

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocabulary: int = 30522,
        max_length: int = 512,
        is_training_head: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, num_heads) for _ in range(num_layers))
        self.head: nn.Module = (
            _MaskedHead(width, vocabulary) if is_training_head else _Pooler(width)
        )

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Encode tokens ``[batch, length]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(positions) + self.segments(segments))
        for layer in self.layers:
            x = layer(x)
        if isinstance(self.head, _MaskedHead):
            return self.head(x, self.words.weight)
        return x, self.head(x)


class _Pooler(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class _MaskedHead(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.norm(functional.gelu(self.dense(x)))
        return functional.linear(x, words, self.bias).flatten(0, 1)


class Gpt2Layer(nn.Module):
    """A decoder layer that normalises before each half."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, is_causal=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt2(nn.Module):
    """
    GPT-2 (Radford et al., 2019), its output tied to its embedding; 124,439,808 parameters if small.

    Takes tokens ``[batch, length]`` and gives logits ``[batch * length, vocabulary]``.
    """

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 12,
        vocabulary: int = 50257,
        max_length: int = 1024,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Gpt2Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = _TiedHead()

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x), self.words.weight)


class _TiedHead(nn.Module):
    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return functional.linear(x, words).flatten(0, 1)


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., 2021)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Mix positions."""
        q, k, v = (
            _split_heads(part(x), self.num_heads) for part in (self.query, self.key, self.value)
        )
        q, k = (_rotate(part, cosine, sine) for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


class GatedMlp(nn.Module):
    """A SwiGLU feed-forward block (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class ExpertMlp(nn.Module):
    """
    A mixture of experts with a fixed capacity (Lepikhin et al., 2020: GShard).

    Every token goes to its best two experts, as far as they have room; each expert is a module of
    its own and takes as many tokens as every other, so that shapes do not depend on values.
    """

    def __init__(self, width: int, inner: int, num_experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.num_chosen = 2
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMlp(width, inner) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by two experts."""
        tokens = x.flatten(0, 1)
        num_tokens, num_experts = tokens.shape[0], len(self.experts)
        capacity = int(self.capacity_factor * self.num_chosen * num_tokens / num_experts)
        weights = torch.softmax(self.router(tokens), 1)
        best, chosen = weights.topk(self.num_chosen, 1)
        best = best / best.sum(1, keepdim=True)
        is_chosen = functional.one_hot(chosen.t().flatten(), num_experts)  # first choices first
        place = (is_chosen.cumsum(0) - 1).gather(1, chosen.t().reshape(-1, 1)).squeeze(1)
        has_room = place < capacity
        slot = torch.where(
            has_room, chosen.t().flatten() * capacity + place, num_experts * capacity
        )
        source = torch.arange(num_tokens, device=x.device).repeat(self.num_chosen)
        sent = tokens.new_zeros(num_experts * capacity + 1, tokens.shape[1])
        sent = sent.index_copy(0, slot, tokens.index_select(0, source))
        parts = sent[:-1].unflatten(0, (num_experts, capacity)).unbind(0)
        done = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        back = torch.cat([*done, tokens.new_zeros(1, tokens.shape[1])]).index_select(0, slot)
        scaled = back * (best.t().flatten() * has_room).unsqueeze(1)
        return scaled.unflatten(0, (self.num_chosen, num_tokens)).sum(0).view_as(x)


class LlamaLayer(nn.Module):
    """A decoder layer of a Llama, with or without a mixture of experts."""

    def __init__(self, width: int, num_heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = RotaryAttention(width, num_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = mlp

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Run the layer."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """
    A decoder of Llama's shape (Touvron et al., 2023); the 7B size has 6,738,415,616 parameters.

    With `num_experts`, every feed-forward block is a mixture of that many. Takes tokens
    ``[batch, length]`` and gives logits ``[batch * length, vocabulary]``.
    """

    def __init__(
        self,
        num_layers: int = 32,
        width: int = 4096,
        num_heads: int = 32,
        inner: int = 11008,
        vocabulary: int = 32000,
        num_experts: int = 0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.head_size = width // num_heads
        self.layers = nn.ModuleList(
            LlamaLayer(
                width,
                num_heads,
                ExpertMlp(width, inner, num_experts, 1.25)
                if num_experts
                else GatedMlp(width, inner),
            )
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the next token at every position."""
        x = self.words(tokens)
        cosine, sine = self._positions(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.head(self.norm(x)).flatten(0, 1)

    def _positions(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.head_size, 2, device=like.device, dtype=torch.float32)
        rates = 10000.0 ** (-half / self.head_size)
        places = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(places, rates).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

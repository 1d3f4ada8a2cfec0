"""
Write the shipped graph `gpt2-small`: one training step of GPT-2 small, told op by op.

The model is the 124-million-parameter GPT-2 (12 layers, width 768, 12 heads, 50,257 tokens), in
float32, with Adam, on a batch of 12 sequences of 1,024 tokens, attention fused as in
`scaled_dot_product_attention`. Flops count a multiply and an add as two; bytes are what an op must
read and write at least. Run it again after changing it:  python tools/make_gpt2_graph.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from placewright import Graph, Op, Output

BATCH, LENGTH, LAYERS, WIDTH, VOCABULARY = 12, 1024, 12, 768, 50257
TOKENS = BATCH * LENGTH
FLOAT, LONG = 4, 8
TARGET = Path(__file__).parent.parent / "src/placewright/models/gpt2-small.graph.json.gz"


@dataclass
class Builder:
    """Collects the ops of forward, backward and update while the model is walked through."""

    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    updates: list[Op] = field(default_factory=list)
    readers: dict[str, list[str]] = field(default_factory=dict)  # of each parameter
    gradients: dict[str, list[str]] = field(default_factory=dict)  # of each parameter, in parts
    elements: dict[str, int] = field(default_factory=dict)

    def parameter(self, name: str, elements: int, module: str) -> str:
        """Declare a parameter: weights, two Adam moments, a forward and a backward alias."""
        size = elements * FLOAT
        outputs: list[int | Output] = [
            Output(size, persistent=True),
            Output(2 * size, persistent=True),
            Output(size, alias_of=name),
            Output(size, alias_of=name),
        ]
        self.forward.append(
            Op(name=name, kind="param", module=module, outputs=outputs, colocate=name)
        )
        self.readers[name], self.gradients[name], self.elements[name] = [], [], elements
        return name

    def op(
        self,
        phase: str,
        name: str,
        kind: str,
        module: str,
        inputs: Sequence[str],
        elements: int,
        flops: float,
        extra_elements: int = 0,
        keep: bool = False,
    ) -> str:
        """Add an op with one output; it moves that, and `extra_elements` for its inputs."""
        for ref in inputs:
            parameter = ref.rpartition(":")[0]
            if parameter in self.readers:
                self.readers[parameter].append(name)
        made = Op(
            name=name,
            kind=kind,
            phase="forward" if phase == "forward" else "backward",
            module=module,
            inputs=tuple(inputs),
            outputs=(Output(elements * FLOAT, keep=True) if keep else elements * FLOAT,),
            flops=flops,
            bytes=float((elements + extra_elements) * FLOAT),
        )
        (self.forward if phase == "forward" else self.backward).append(made)
        return name

    def gradient(self, parameter: str, part: str) -> None:
        """Note that op `part` makes (a part of) the gradient of `parameter`."""
        self.gradients[parameter].append(part)

    def update(self, parameter: str, module: str) -> None:
        """Add the Adam step of a parameter, after everything that reads it."""
        elements = self.elements[parameter]
        self.updates.append(
            Op(
                name=f"{parameter}.adam",
                kind="adam",
                phase="update",
                module=module,
                inputs=(parameter, f"{parameter}:1", *self.gradients[parameter]),
                after=tuple(self.readers[parameter]),
                outputs=(),
                flops=12.0 * elements,
                bytes=float(7 * elements * FLOAT),
                colocate=parameter,
            )
        )


@dataclass
class Linear:
    """A matrix product with a weight, forwards and backwards."""

    build: Builder
    name: str
    module: str
    inside: int
    outside: int
    rows: int = TOKENS

    def __post_init__(self) -> None:
        self.weight = self.build.parameter(
            f"{self.name}.weight", self.inside * self.outside, self.module
        )
        self.flops = 2.0 * self.rows * self.inside * self.outside

    def forward(self, x: str, keep: bool = False) -> str:
        moved = self.rows * self.inside + self.inside * self.outside
        return self.build.op(
            "forward", self.name, "aten.mm", self.module, (x, f"{self.weight}:2"),
            self.rows * self.outside, self.flops, moved, keep,
        )  # fmt: skip

    def backward(self, x: str, grad: str) -> str:
        moved = self.rows * self.outside
        part = self.build.op(
            "backward", f"{self.name}.grad_weight", "aten.mm", self.module, (x, grad),
            self.inside * self.outside, self.flops, moved + self.rows * self.inside,
        )  # fmt: skip
        self.build.gradient(self.weight, part)
        return self.build.op(
            "backward", f"{self.name}.grad_input", "aten.mm", self.module,
            (grad, f"{self.weight}:3"), self.rows * self.inside, self.flops,
            moved + self.inside * self.outside,
        )  # fmt: skip


@dataclass
class Norm:
    """A layer normalisation, forwards and backwards."""

    build: Builder
    name: str
    module: str

    def __post_init__(self) -> None:
        self.weight = self.build.parameter(f"{self.name}.weight", 2 * WIDTH, self.module)

    def forward(self, x: str) -> str:
        size = TOKENS * WIDTH
        return self.build.op(
            "forward", self.name, "aten.native_layer_norm", self.module,
            (x, f"{self.weight}:2"), size, 8.0 * size, size,
        )  # fmt: skip

    def backward(self, x: str, grad: str) -> str:
        size = TOKENS * WIDTH
        part = self.build.op(
            "backward", f"{self.name}.grad_weight", "aten.sum", self.module, (x, grad),
            2 * WIDTH, 4.0 * size, 2 * size,
        )  # fmt: skip
        self.build.gradient(self.weight, part)
        return self.build.op(
            "backward", f"{self.name}.grad_input", "aten.native_layer_norm_backward",
            self.module, (x, grad, f"{self.weight}:3"), size, 12.0 * size, 2 * size,
        )  # fmt: skip


class Block:
    """One transformer layer."""

    def __init__(self, build: Builder, layer: int) -> None:
        self.build = build
        self.module = f"transformer.h.{layer}"
        part = lambda name: f"{self.module}.{name}"  # noqa: E731
        self.norm_1 = Norm(build, part("ln_1"), self.module)
        self.qkv = Linear(build, part("attn.c_attn"), self.module, WIDTH, 3 * WIDTH)
        self.project = Linear(build, part("attn.c_proj"), self.module, WIDTH, WIDTH)
        self.norm_2 = Norm(build, part("ln_2"), self.module)
        self.up = Linear(build, part("mlp.c_fc"), self.module, WIDTH, 4 * WIDTH)
        self.down = Linear(build, part("mlp.c_proj"), self.module, 4 * WIDTH, WIDTH)

    def pointwise(self, phase: str, name: str, inputs: Sequence[str], elements: int) -> str:
        kind = "aten.gelu" if "gelu" in name else "aten.add"
        return self.build.op(
            phase, f"{self.module}.{name}", kind, self.module, inputs, elements,
            float(elements), len(inputs) * elements,
        )  # fmt: skip

    def forward(self, x: str) -> str:
        size = TOKENS * WIDTH
        self.x = x
        self.normed_1 = self.norm_1.forward(x)
        self.projected = self.qkv.forward(self.normed_1)
        self.attended = self.build.op(
            "forward", f"{self.module}.attn", "aten.scaled_dot_product_attention", self.module,
            (self.projected,), size, 4.0 * BATCH * LENGTH * LENGTH * WIDTH, 3 * size,
        )  # fmt: skip
        mixed = self.project.forward(self.attended)
        self.middle = self.pointwise("forward", "add_1", (x, mixed), size)
        self.normed_2 = self.norm_2.forward(self.middle)
        self.raised = self.up.forward(self.normed_2)
        self.bent = self.pointwise("forward", "mlp.gelu", (self.raised,), 4 * size)
        lowered = self.down.forward(self.bent)
        return self.pointwise("forward", "add_2", (self.middle, lowered), size)

    def backward(self, grad: str) -> str:
        size = TOKENS * WIDTH
        grad_bent = self.down.backward(self.bent, grad)
        grad_raised = self.pointwise(
            "backward", "mlp.gelu_backward", (self.raised, grad_bent), 4 * size
        )
        grad_normed = self.up.backward(self.normed_2, grad_raised)
        grad_middle = self.norm_2.backward(self.middle, grad_normed)
        grad_middle = self.pointwise("backward", "add_2.grad", (grad, grad_middle), size)
        grad_attended = self.project.backward(self.attended, grad_middle)
        grad_qkv = self.build.op(
            "backward", f"{self.module}.attn.backward",
            "aten.scaled_dot_product_attention_backward", self.module,
            (self.projected, self.attended, grad_attended), 3 * size,
            10.0 * BATCH * LENGTH * LENGTH * WIDTH, 5 * size,
        )  # fmt: skip
        grad_normed = self.qkv.backward(self.normed_1, grad_qkv)
        grad_x = self.norm_1.backward(self.x, grad_normed)
        return self.pointwise("backward", "add_1.grad", (grad_middle, grad_x), size)

    def update(self) -> None:
        for part in (self.norm_1, self.qkv, self.project, self.norm_2, self.up, self.down):
            self.build.update(part.weight, self.module)


def make_graph() -> Graph:
    """Walk through the model once, forwards and backwards."""
    build = Builder()
    size = TOKENS * WIDTH
    for name in ("tokens", "targets"):
        build.forward.append(Op(name=name, kind="input", outputs=(TOKENS * LONG,)))
    table = build.parameter("transformer.wte", VOCABULARY * WIDTH, "transformer.wte")
    positions = build.parameter("transformer.wpe", LENGTH * WIDTH, "transformer.wpe")
    x = build.op(
        "forward", "transformer.embed", "aten.embedding", "transformer.wte",
        ("tokens", f"{table}:2", f"{positions}:2"), size, float(size), 2 * size,
    )  # fmt: skip
    blocks = [Block(build, layer) for layer in range(LAYERS)]
    for block in blocks:
        x = block.forward(x)
    norm = Norm(build, "transformer.ln_f", "transformer.ln_f")
    final = norm.forward(x)
    # The output layer shares its weights with the embedding.
    flops = 2.0 * TOKENS * WIDTH * VOCABULARY
    moved = size + WIDTH * VOCABULARY
    logits = build.op(
        "forward", "lm_head", "aten.mm", "lm_head", (final, f"{table}:2"), TOKENS * VOCABULARY,
        flops, moved,
    )  # fmt: skip
    build.op(
        "forward", "loss", "aten.cross_entropy_loss", "loss", (logits, "targets"), 1,
        5.0 * TOKENS * VOCABULARY, TOKENS * VOCABULARY, keep=True,
    )  # fmt: skip
    grad = build.op(
        "backward", "loss.backward", "aten.cross_entropy_loss_backward", "loss",
        (logits, "targets", "loss"), TOKENS * VOCABULARY, 3.0 * TOKENS * VOCABULARY,
        TOKENS * VOCABULARY,
    )  # fmt: skip
    part = build.op(
        "backward", "lm_head.grad_weight", "aten.mm", "lm_head", (final, grad),
        WIDTH * VOCABULARY, flops, size + TOKENS * VOCABULARY,
    )  # fmt: skip
    build.gradient(table, part)
    grad = build.op(
        "backward", "lm_head.grad_input", "aten.mm", "lm_head", (grad, f"{table}:3"), size, flops,
        TOKENS * VOCABULARY + WIDTH * VOCABULARY,
    )  # fmt: skip
    grad = norm.backward(x, grad)
    for block in reversed(blocks):
        grad = block.backward(grad)
    for parameter, elements in ((table, VOCABULARY * WIDTH), (positions, LENGTH * WIDTH)):
        part = build.op(
            "backward", f"{parameter}.grad", "aten.embedding_dense_backward", parameter,
            ("tokens", grad), elements, float(size), size,
        )  # fmt: skip
        build.gradient(parameter, part)
    for block in blocks:
        block.update()
    for parameter, module in (
        (table, "transformer.wte"), (positions, "transformer.wpe"), (norm.weight, norm.module),
    ):  # fmt: skip
        build.update(parameter, module)
    return Graph.build("gpt2-small", [*build.forward, *build.backward, *build.updates])


if __name__ == "__main__":
    graph = make_graph()
    graph.save(TARGET)
    print(f"{TARGET.name}: {graph.num_ops} ops, {TARGET.stat().st_size:,} bytes")

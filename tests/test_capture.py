"""Capturing PyTorch modules: what the graph says, and that the captured step is the real one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import placewright as pw  # noqa: E402
from placewright import zoo  # noqa: E402
from placewright.errors import InputError  # noqa: E402
from placewright.frontends.torch import capture  # noqa: E402
from tests.stepping import random_order, run_in_order  # noqa: E402

TINY = [name for name in zoo.RECIPES if name.startswith("tiny-")]


def ops_of(graph):
    return {op.name: op for op in graph.describe()}


def eager(workload):
    """Loss and gradients as PyTorch computes them."""
    result = workload.module(*workload.inputs)
    loss = workload.loss(result, *workload.targets)
    parameters = dict(workload.module.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    return loss, {k: g for k, g in zip(parameters, found, strict=True) if g is not None}


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("name", TINY)
def test_the_captured_step_gives_the_loss_gradients_and_update_of_eager_pytorch(name):
    work = zoo.build(name, device="cpu", seed=3)
    made = capture(**work.arguments())
    arguments = clones(made.bind(work.module, work.inputs, work.targets))
    loss, _, gradients = made.module(*arguments)
    expected_loss, expected = eager(zoo.build(name, device="cpu", seed=3))
    assert torch.equal(loss, expected_loss)
    assert list(made.parameters) == list(expected)
    for gradient, (key, wanted) in zip(gradients, expected.items(), strict=True):
        assert torch.equal(gradient, wanted), key


@pytest.mark.parametrize("name", TINY)
def test_any_order_that_the_graph_allows_gives_the_same_step(name):
    work = zoo.build(name, device="cpu", seed=3)
    made = capture(**work.arguments())
    arguments = made.bind(work.module, work.inputs, work.targets)
    first = clones(arguments)
    loss, _, gradients = made.module(*first)
    for seed in range(2):
        again = clones(arguments)
        order = random_order(made.graph, seed)
        other_loss, _, other_gradients = run_in_order(made, again, order)
        assert torch.equal(loss, other_loss)
        for key, a, b in zip(made.parameters, gradients, other_gradients, strict=True):
            assert torch.equal(a, b), key
        for a, b in zip(first, again, strict=True):  # parameters, buffers and state, updated
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.01, fused=True)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.001, fused=True)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.001, fused=True)),
        (None, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, amsgrad=True, fused=True)),
        (
            None,
            lambda p: torch.optim.SGD(
                p, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1, fused=True
            ),
        ),
    ],
)
def test_updates_are_those_of_torch_optim_over_several_steps(name, make):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    optimizer = make(module.parameters())
    made = capture(
        module,
        x,
        train=True,
        loss=functional.mse_loss,
        targets=y,
        optimizer=name or optimizer,
    )
    arguments = clones(made.bind(module, x, y))
    for _ in range(3):
        made.module(*arguments)
        optimizer.zero_grad()
        functional.mse_loss(module(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(arguments, module.parameters(), strict=False):
        assert torch.equal(ours, theirs)


def shapes_of(graph):
    return {graph.tensor_name(t): shape for t, shape in enumerate(graph.tensor_shapes)}


def test_shapes_of_parameters_their_state_inputs_and_results_are_captured():
    made = capture(nn.Linear(3, 5), torch.randn(2, 3))
    assert shapes_of(made.graph) == {
        "weight": (5, 3),
        "weight:1": (5, 3),  # read by the forward pass
        "bias": (5,),
        "bias:1": (5,),
        "input.0": (2, 3),
        "addmm": (2, 5),
    }
    made = capture(
        nn.Linear(3, 5), torch.randn(2, 3), train=True, loss=lambda y: y.sum(), optimizer="adam"
    )
    shapes = shapes_of(made.graph)
    weight = [shapes[name] for name in ("weight", "weight:1", "weight:2", "weight:3", "weight:4")]
    assert weight == [(5, 3), (5, 3), (5, 3), (), (5, 3)]  # itself, Adam's state, the alias
    assert shapes["backward.mm"] == (5, 3)
    assert shapes["loss.sum"] == ()


def test_a_part_of_a_tensor_has_the_parts_shape_and_an_overwritten_one_its_own():
    class Module(nn.Module):
        def forward(self, x):
            y = x.exp()
            y[1:].mul_(2)
            return y[:, 1].sin(), torch.zeros(4, 4)[1]

    assert shapes_of(capture(Module(), torch.randn(3, 2)).graph) == {
        "input.0": (3, 2),
        "exp": (3, 2),
        "mul_": (3, 2),  # all of `y`, of which it overwrites a part
        "mul_:1": (3,),  # what `sin` reads of it
        "sin": (3,),
        "zeros": (4, 4),
        "zeros:1": (4,),
    }


def test_a_shape_of_very_many_dimensions_is_left_unknown():
    made = capture(nn.ReLU(), torch.randn([1] * 17))
    assert made.graph.tensor_shapes == (None, None)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_training_step_has_the_ops_worked_out_by_hand():
    made = capture(
        TwoLayers(),
        torch.randn(2, 8),
        train=True,
        loss=lambda y: y.sum(),
        optimizer="adam",
        name="two",
    )
    ops = ops_of(made.graph)
    assert list(ops) == [
        "first.weight",
        "second.weight",
        "input.0",
        "first.mm",
        "tanh",
        "second.mm",
        "loss.sum",
        "second.backward.mm",
        "second.backward.mm_2",
        "backward.tanh_backward",
        "first.backward.mm",
        "first.weight.update",
        "second.weight.update",
    ]
    size = 16 * 8 * 4
    weight = ops["first.weight"]
    # Weights, two moments and a step count stay; forward and backward readers have an alias each.
    assert [o.bytes for o in weight.outputs if not isinstance(o, int) and o.persistent] == [
        size,
        size,
        size,
        4,
    ]
    mm = ops["first.mm"]
    assert (mm.kind, mm.phase, mm.module, mm.dtype) == ("aten.mm", "forward", "first", "float32")
    assert mm.flops == 2 * 2 * 8 * 16
    assert mm.bytes == (2 * 8 + 8 * 16 + 2 * 16) * 4
    assert set(mm.inputs) == {"first.weight:4", "input.0"}
    assert ops["first.backward.mm"].phase == "backward"
    update = ops["first.weight.update"]
    assert (update.kind, update.phase) == ("aten._fused_adam_", "update")
    assert update.colocate == weight.colocate == "first.weight"
    assert "first.backward.mm" in update.inputs
    assert "first.mm" in update.after
    assert made.graph.name == "two"


def test_forward_and_backward_readers_of_a_parameter_use_two_aliases():
    made = capture(TwoLayers(), torch.randn(2, 8), train=True, loss=lambda y: y.sum())
    ops = ops_of(made.graph)
    forward, backward = ops["second.mm"].inputs, ops["second.backward.mm_2"].inputs
    mine = [ref for ref in (*forward, *backward) if ref.startswith("second.weight:")]
    assert len(set(mine)) == 2
    for ref in mine:
        alias = ops["second.weight"].outputs[int(ref.rpartition(":")[2])]
        assert alias.alias_of == "second.weight"
        assert alias.bytes == 16 * 4 * 4


def test_forward_only_keeps_the_outputs_and_has_no_backward():
    made = capture(TwoLayers(), torch.randn(2, 8))
    assert set(made.graph.op_phases) == {"forward"}
    last = ops_of(made.graph)["second.mm"].outputs[0]
    assert last.keep
    assert made.cut.gradients == ()
    graph, module = made
    assert graph is made.graph
    assert module is made.module


class Cut(nn.Module):
    def forward(self, x):
        left, right = x.chunk(2, 1)
        return left.t().contiguous(), torch.exp(right).view(-1), x.view(-1) + 1


def test_a_smaller_view_is_an_alias_and_an_equal_one_is_folded():
    ops = ops_of(capture(Cut(), torch.randn(6, 4)).graph)
    assert list(ops) == ["input.0", "clone", "exp", "add"]
    given = ops["input.0"].outputs
    assert (given[0].bytes, given[0].alias_of) == (96, None)
    assert [(o.bytes, o.alias_of) for o in given[1:]] == [(48, "input.0"), (48, "input.0")]
    assert ops["clone"].inputs == ("input.0:1",)
    assert ops["exp"].inputs == ("input.0:2",)
    assert ops["add"].inputs == ("input.0",)


class InPlace(nn.Module):
    """Overwrites parts of tensors, through views taken before and after."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x):
        y = x * self.scale
        before = y.sum()  # reads y as it is now
        half = y[:, :3]
        late = y[:, 3:]
        half.mul_(2.0)  # overwrites a part
        y[:, 4] = 7.0  # and another
        z = late + before  # sees the second write through an old view
        table = torch.zeros(2, 6)
        table[0] = y[1]
        self.seen.add_(1)
        self.total.add_(z.detach().sum() * self.seen)
        after = table + self.total  # reads the buffer as it was overwritten
        self.total.mul_(0.5)
        return torch.relu_(y * 1.0).sum() + z.sum() + (after * table).sum()


@pytest.mark.parametrize("seed", range(8))
def test_in_place_ops_are_right_in_every_order(seed):
    torch.manual_seed(seed)
    module, x = InPlace(), torch.randn(3, 6)
    made = capture(module, x, train=True, optimizer="sgd")
    arguments = clones(made.bind(module, x))
    loss, _, (gradient,) = run_in_order(made, arguments, random_order(made.graph, seed))
    expected = module(x)
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, module.scale)[0])
    assert torch.equal(arguments[1], module.seen)
    assert torch.equal(arguments[2], module.total)


def test_an_op_that_overwrites_waits_for_those_who_read_before():
    ops = ops_of(capture(InPlace(), torch.randn(3, 6)).graph)
    assert "sum" in ops["mul_"].after
    assert ops["mul_"].outputs[0].alias_of == "mul"
    assert ops["seen"].colocate == ops["add_"].colocate


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x)


def test_batch_normalisation_is_co_located_with_the_statistics_it_overwrites():
    module, x = Counted(), torch.randn(2, 3, 4, 4)
    made = capture(module, x)
    ops = ops_of(made.graph)
    norm = ops["norm.native_batch_norm"]
    assert norm.colocate == ops["norm.running_mean"].colocate == ops["norm.running_var"].colocate
    arguments = clones(made.bind(module, x))
    run_in_order(made, arguments, random_order(made.graph, 0))
    module(x)
    for ours, theirs in zip(arguments[2:], module.buffers(), strict=False):
        assert torch.equal(ours, theirs)
    evaluated = ops_of(capture(Counted().eval(), x).graph)
    assert all(op.colocate is None for op in evaluated.values())


def test_the_cut_names_outputs_and_their_gradients():
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            hidden = self.body(x)
            return {"unused": hidden.detach() * 2, "hidden": hidden, "logits": self.head(hidden)}

    def loss(out, target):
        return out["hidden"].square().mean() + functional.mse_loss(out["logits"], target)

    torch.manual_seed(0)
    module, x, y = TwoOutputs(), torch.randn(3, 4), torch.randn(3, 2)
    made = capture(module, x, train=True, loss=loss, targets=y)
    assert len(made.cut.outputs) == 3
    assert len(made.cut.gradients) == 2
    # What lies before the outputs, and what the gradients lead to, is enough to compute with the
    # user's own loss: swap the captured loss for another one.
    graph = made.module.graph
    nodes = {node.name: node for node in graph.nodes}
    scaled = torch.fx.Graph()
    seen = {}
    for node in graph.nodes:
        seen[node] = scaled.node_copy(node, seen.__getitem__)
        if node.name in made.cut.gradients:
            seen[node] = scaled.call_function(torch.mul, (seen[node], 10.0))
    again = torch.fx.GraphModule(made.module, scaled)
    _, _, gradients = again(*made.bind(module, x, y))
    expected = torch.autograd.grad(10 * loss(module(x), y), [*module.parameters()])
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(name in nodes for name in (*made.cut.outputs, *made.cut.gradients))


def test_backward_ops_belong_to_the_module_of_their_forward_op():
    work = zoo.build("tiny-nmt")
    graph = capture(**work.arguments()).graph
    backward = {
        module
        for module, phase in zip(graph.op_modules, graph.op_phases, strict=True)
        if phase == "backward"
    }
    assert {"encoder.0.gates", "decoder.1", "attention", "softmax", "loss"} <= backward
    named = sum(bool(module) for module in graph.op_modules)
    assert named > 0.9 * graph.num_ops


def test_sums_at_end_keep_every_part_of_a_gradient_until_all_are_there():
    work = zoo.build("tiny-rnnlm").arguments()
    kept = capture(**work | {"sums_at_end": True})
    running = capture(**work | {"sums_at_end": False})
    ops = ops_of(kept.graph)
    update = ops["layers.0.gates.weight.update"]
    whole = next(name for name in update.inputs if "backward.add" in name)
    assert len(ops[whole].inputs) == 5  # one for each step
    assert kept.graph.num_ops < running.graph.num_ops
    assert kept.graph.op_flops.sum() == running.graph.op_flops.sum()


def test_tied_weights_are_one_parameter():
    module = zoo.build("tiny-gpt2").module
    graph = capture(**zoo.build("tiny-gpt2").arguments()).graph
    assert [*graph.op_kinds].count("param") == len([*module.parameters()])
    tied = graph.op_index["words.weight"]
    tensors = range(graph.op_outputs[tied], graph.op_outputs[tied + 1])
    readers = {
        graph.op_modules[op]
        for t in tensors
        for op in graph.use_op[graph.tensor_uses[t] : graph.tensor_uses[t + 1]]
    }
    assert {"words", "head"} <= readers


def test_frozen_parameters_have_no_update():
    module = TwoLayers()
    module.first.weight.requires_grad_(False)
    graph = capture(
        module, torch.randn(2, 8), train=True, loss=lambda y: y.sum(), optimizer="adam"
    ).graph
    assert [name for name in graph.op_names if "update" in name] == ["second.weight.update"]
    assert graph.op_names.count("first.weight") == 1


def test_constants_of_a_model_are_kept_with_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = torch.tensor([1.0, 0.0, 1.0])  # not registered

        def forward(self, x):
            return x * self.mask + torch.tensor([1.0, 2.0, 3.0])

    module, x = Masked(), torch.randn(2, 3)
    made = capture(module, x)
    assert [*made.graph.op_kinds].count("constant") >= 1
    _, (result,), _ = made.module(*made.bind(module, x))
    assert torch.equal(result, module(x))
    # Capturing leaves the module as it was, and works again.
    assert capture(module, x).graph.fingerprint == made.graph.fingerprint


def test_nothing_is_allocated_for_a_model_of_seven_billion_parameters():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = capture(**zoo.build("llama-7b-forward").arguments())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = made.graph.tensor_bytes[made.graph.tensor_persistent]
    assert parameters.sum() == 2 * 6_738_415_616
    assert after - before < 500_000  # kB


def test_the_same_module_gives_the_same_graph():
    prints = {capture(**zoo.build("tiny-moe").arguments()).graph.fingerprint for _ in range(2)}
    assert len(prints) == 1


def test_captured_graphs_simulate_and_fit_the_public_api():
    graph = pw.capture(TwoLayers(), torch.randn(2, 8)).graph
    problem = pw.Problem(graph, pw.load_cluster("laptop"))
    assert pw.simulate(problem, [1] * graph.num_ops).makespan_s > 0


def compared(module, inputs, loss=None, targets=(), **more):
    """Capture a step, run it in a random order, and hold it equal to eager; give the capture."""
    made = capture(module, inputs, train=True, loss=loss, targets=targets, **more)
    arguments = clones(made.bind(module, inputs, targets))
    found, _, gradients = run_in_order(made, arguments, random_order(made.graph, 0))
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    result = module(*args)
    expected = result if loss is None else loss(result, *targets)
    parameters = dict(module.named_parameters())
    wanted = torch.autograd.grad(expected, [*parameters.values()], allow_unused=True)
    assert torch.equal(found, expected)
    known = {k: g for k, g in zip(parameters, wanted, strict=True) if g is not None}
    assert list(made.parameters) == list(known)
    for key, ours in zip(made.parameters, gradients, strict=True):
        torch.testing.assert_close(ours, known[key])
    return made


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.a(x)
        return hidden, hidden, self.b(x)


def test_a_tensor_that_is_returned_twice_counts_once():
    compared(Pair(), torch.randn(2, 3), lambda o: (o[0] * o[1]).sum() + (o[2] ** 3).sum())


def test_a_loss_may_read_the_parameters_itself():
    module = TwoLayers()

    def loss(y):
        return y.sum() + 0.1 * sum(p.pow(2).sum() for p in module.parameters())

    made = compared(module, torch.randn(2, 8), loss)
    assert "constant" not in made.graph.op_kinds


def test_checkpointed_parts_read_the_same_parameters_again():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False)
            return self.b(x).sum()

    made = compared(Recomputed(), torch.randn(2, 4), optimizer="adam")
    assert "constant" not in made.graph.op_kinds


class Cached(nn.Module):
    """Keeps tensors of its own in plain attributes, and assigns to a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.positions = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(4.0)
        self.last = x * self.weight
        self.mean = 0.9 * self.mean + 0.1 * self.last.detach().mean(0)
        return (self.last + self.positions).sum() * self.mean.sum()


def test_capturing_leaves_no_fake_tensor_behind_and_keeps_assigned_buffers():
    module, x = Cached(), torch.randn(2, 4)
    made = capture(module, x, train=True)
    assert module.positions is None
    assert not hasattr(module, "last")
    assert isinstance(module.weight, nn.Parameter)
    assert capture(module, x, train=True).graph.fingerprint == made.graph.fingerprint
    arguments = clones(made.bind(module, x))
    loss, _, _ = run_in_order(made, arguments, random_order(made.graph, 3))
    assert torch.equal(loss, module(x))
    assert torch.equal(arguments[1], module.mean)


def test_a_buffer_that_was_overwritten_is_read_from_who_overwrote_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(4))

        def forward(self, x):
            y = x * self.b
            self.b.add_(1)
            return y * self.b

    ops = ops_of(capture(Twice(), torch.randn(4)).graph)
    assert "b:1" in ops["mul"].inputs
    assert "add_" in ops["mul_2"].inputs
    assert ops["add_"].outputs[0].alias_of == "b"


def test_inputs_and_targets_may_be_dataclasses_and_keyword_arguments():
    from dataclasses import dataclass

    @dataclass
    class Given:
        x: torch.Tensor
        y: torch.Tensor

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, given, z, *, scale):
            return (given.x * self.weight - given.y * z).mul(scale).sum()

    module = Takes()
    given, z, scale = Given(torch.randn(3), torch.randn(3)), torch.randn(3), torch.randn(3)
    made = capture(module, (given, z), kwargs={"scale": scale}, train=True)
    assert [*made.graph.op_kinds].count("input") == 4
    loss, _, _ = made.module(*made.bind(module, (given, z), kwargs={"scale": scale}))
    assert torch.equal(loss, module(given, z, scale=scale))


def test_hooks_on_parameters_are_kept():
    module = TwoLayers()
    module.first.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    compared(module, torch.randn(2, 8), lambda y: y.square().sum())


def test_names_that_differ_only_in_dots_do_not_collide():
    class Colliding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.a_weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (self.a(x) * self.a_weight).sum()

    compared(Colliding(), torch.randn(2, 3))


def test_what_pytorch_logs_of_its_own_is_not_printed(capfd):
    with pytest.raises(InputError):
        capture(nn.Linear(4, 4), torch.zeros(2, 5))
    assert capfd.readouterr() == ("", "")


class Exits(nn.Module):
    def forward(self, x):
        raise SystemExit(3)


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.function = function

    def forward(self, x):
        return self.function.apply(x * self.weight).sum()


def test_custom_autograd_functions_of_pytorch_ops_are_captured():
    module, x = Calls(Square), torch.randn(3)
    made = capture(module, x, train=True)
    _, _, (gradient,) = made.module(*made.bind(module, x))
    assert torch.equal(gradient, torch.autograd.grad(module(x), module.weight)[0])


@torch.library.custom_op("placewright_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Custom(nn.Module):
    def forward(self, x):
        return twice(x)


@pytest.mark.parametrize(
    ("module", "inputs", "options", "words"),
    [
        (Branches(), torch.randn(3), {}, r"line \d+, needs the value of a tensor .*torch\.where"),
        (Selects(), torch.randn(3), {}, r"line \d+, makes a tensor whose shape depends on values"),
        (Custom(), torch.randn(3), {}, r"placewright_tests.twice.*register_fake"),
        (Calls(Numpy), torch.randn(3), {}, r"line \d+, .*numpy"),
        (TwoLayers(), torch.randn(2, 9), {}, r"line \d+, raised RuntimeError.*Check that"),
        (TwoLayers(), (), {}, "raised TypeError"),
        (TwoLayers(), torch.randn(2, 8), {"train": True}, "needs a loss"),
        (
            TwoLayers(),
            torch.randn(2, 8),
            {"train": True, "loss": lambda y: y},
            r"The loss has shape \[2, 4\]; expected one number",
        ),
        (
            TwoLayers(),
            torch.randn(2, 8),
            {"train": True, "loss": lambda y: torch.ones(())},
            "does not depend|no grad|require grad",
        ),
        (
            TwoLayers().requires_grad_(False),
            torch.randn(2, 8),
            {"train": True, "loss": lambda y: y.sum()},
            "has a gradient",
        ),
        (TwoLayers(), torch.randn(2, 8), {"optimizer": "adam"}, "pass `train=True`"),
        (
            TwoLayers(),
            torch.randn(2, 8),
            {"train": True, "loss": lambda y: y.sum(), "optimizer": "lion"},
            "no optimizer `lion`",
        ),
        (
            TwoLayers(),
            torch.randn(2, 8),
            {
                "train": True,
                "loss": lambda y: y.sum(),
                "optimizer": torch.optim.SGD(TwoLayers().parameters(), lr=0.1),
            },
            "parameter that `module` does not",
        ),
        (
            TwoLayers(),
            torch.randn(2, 8),
            {
                "train": True,
                "loss": lambda y: y.sum(),
                "optimizer": torch.optim.Adagrad(TwoLayers().parameters()),
            },
            "expected torch.optim.SGD, Adam or AdamW",
        ),
        (lambda x: x, torch.randn(2), {}, "expected a torch.nn.Module"),
        (nn.LazyLinear(4), torch.zeros(2, 4), {}, "`weight` has no shape yet"),
        (TwoLayers(), torch.zeros(2, 8).to_sparse(), {}, "expected a dense tensor"),
        (Exits(), torch.zeros(2), {}, r"ended the program with `sys\.exit\(3\)`"),
        (TwoLayers(), torch.zeros(2, 8), {"train": True, "loss": "mse"}, "`loss` is a str"),
        (
            TwoLayers(),
            torch.zeros(2, 8),
            {"train": True, "loss": lambda y: 3.0},
            "`loss` returned a float",
        ),
    ],
)
def test_what_cannot_be_captured_is_told_in_a_sentence(module, inputs, options, words):
    with pytest.raises(InputError, match=words) as caught:
        capture(module, inputs, **options)
    assert "\n" not in str(caught.value)


def test_an_exception_leaves_pytorch_as_it_was():
    with pytest.raises(InputError):
        capture(Branches(), torch.randn(3))
    assert torch.ones(2).sum().item() == 2.0
    assert torch.is_grad_enabled()
    made = capture(TwoLayers(), torch.randn(2, 8))
    assert made.graph.num_ops == 6

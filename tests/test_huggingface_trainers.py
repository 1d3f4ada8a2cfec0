"""Placed models in Hugging Face's `Trainer` and in `accelerate`, as they are."""

from __future__ import annotations

import copy
import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed

from placewright.errors import InputError
from tests.marks import any_call, two_cores
from tests.placed_models import build, differences, place, same, same_weights

transformers.logging.set_verbosity_error()

pytestmark = [
    two_cores,
    any_call,
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_state(one_thread):
    """Have `accelerate` forget what a test has set for all of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def rows_of(given, count=5):
    """List rows, each of other words, with a column that no model takes."""
    torch.manual_seed(1)
    rows = []
    for number in range(count):
        row = {key: value[number % 2] for key, value in given.items()}
        if "input_ids" in row:
            row["input_ids"] = torch.randint(3, 60, row["input_ids"].shape)
            row["attention_mask"] = given["attention_mask"][-1]
        rows.append({**row, "remark": number})
    return rows


def train(model, rows, folder, *, resume=False, **settings):
    """Train and evaluate a model as people do; list what was logged."""
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
        **defaults | settings,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    measures = [*trainer.state.log_history, trainer.evaluate()]
    shown = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss")
    return [[(key, each[key]) for key in shown if key in each] for each in measures]


KINDS = [
    ("roberta", {}),
    ("gpt2", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    ("t5", {"max_grad_norm": 0.1}),
]
OTHER_KINDS = [
    ("bart", {}),
    ("llama", {"optim": "adafactor"}),
    ("vit", {}),
    ("bert", {"bf16": True}),
    ("roberta", {"gradient_checkpointing": True}),
    ("llama", {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}),
    ("bert", {"optim": "sgd", "lr_scheduler_type": "linear", "auto_find_batch_size": True}),
    ("bert", {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 4}),
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)],
)
def test_a_trainer_trains_evaluates_saves_and_resumes(name, settings, tmp_path):
    module, given = build(name)
    rows, fresh = rows_of(given), copy.deepcopy(module)
    models = {"placed": place(module.train(), given), "plain": module}
    found = {key: train(m, rows, tmp_path / key, **settings) for key, m in models.items()}
    assert found["placed"] == found["plain"]
    assert same_weights(models["placed"], models["plain"])
    saved = {key: {*os.listdir(tmp_path / key / "checkpoint-2")} for key in models}
    assert saved["placed"] == saved["plain"]
    again = {"placed": place(fresh.train(), given, seed=2), "plain": fresh}
    resumed = {
        key: train(m, rows, tmp_path / key, resume=True, **settings) for key, m in again.items()
    }
    assert resumed["placed"] == resumed["plain"]
    assert same_weights(again["placed"], again["plain"])


def test_reentrant_checkpointing_in_a_trainer_is_refused_and_the_model_stays(tmp_path):
    module, given = build("llama")
    placed = place(module.train(), given)
    kind = {"use_reentrant": True}
    with pytest.raises(InputError, match="use_reentrant=False"):
        train(
            placed,
            rows_of(given),
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs=kind,
        )
    placed.gradient_checkpointing_disable()
    for model in (placed, module):
        model.zero_grad()
        model(**given).loss.backward()
    assert not differences(placed, module)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_accelerate_prepares_trains_saves_and_loads(name, precision, tmp_path):
    module, given = build(name)
    rows = [{k: v for k, v in row.items() if k != "remark"} for row in rows_of(given)]
    models = {"placed": place(module.train(), given), "plain": module}
    found = {
        key: accelerate(model, rows, precision, tmp_path / key) for key, model in models.items()
    }
    assert same(found["placed"], found["plain"])
    assert same_weights(models["placed"], models["plain"])


def accelerate(model, rows, precision, folder):
    """Train with `accelerate`, save, train on, and go back to what was saved."""
    set_seed(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = []

    def epoch():
        prepared.train()
        for batch in loader:
            with accelerator.accumulate(prepared):
                result = prepared(**batch)
                accelerator.backward(result.loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.extend([result.loss.detach(), result.logits.detach()])

    epoch()
    accelerator.save_state(str(folder))
    saved = copy.deepcopy(model.state_dict())
    epoch()
    accelerator.load_state(str(folder))
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
    epoch()
    prepared.eval()
    with torch.no_grad():
        found.append(prepared(**next(iter(loader))).logits)
    assert accelerator.unwrap_model(prepared) is model
    return found

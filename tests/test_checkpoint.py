"""Checkpoints of FP8 runs are those of bf16 runs: seed, save and resume, export."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from trainings import CREATE_SEED, FP8, Run, seed_checkpoint, start, start_from_seed

from titan_fp8moe import convert_experts

EP = "--parallelism.expert_parallel_degree=2"
TP = "--parallelism.tensor_parallel_degree=2"
PP = "--parallelism.pipeline_parallel_degree=2"
STEPS = ["--training.steps=4", "--checkpoint.interval=2"]
WORLDS = {
    "one process": (1, ()),
    "EP": (2, (EP,)),
    "TP": (2, (TP,)),
    "PP": (2, (PP, "--parallelism.pipeline_parallel_schedule=1F1B")),
    "EP + FSDP": (4, (EP,)),
}
in_each_world = pytest.mark.parametrize(
    "world",
    [pytest.param(w, marks=() if w in ("one process", "EP") else pytest.mark.slow) for w in WORLDS],
)


def load(checkpoint: Path, *, weights_only: bool = False):
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    return torch.load(whole, weights_only=weights_only)


def flat(value, name: str = "") -> dict:
    """Everything in nested dicts and lists by its path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, child in items for path, leaf in flat(child, f"{name}/{key}").items()}
    return {name: value}


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in flat(load(checkpoint)).items() if isinstance(value, torch.Tensor)}


def assert_same_tensors(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert type(actual[name]) is type(value) is torch.Tensor, name
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


@pytest.fixture
def run(tmp_path):
    """Trains and saves at step 2 and 4; with ``resume`` it goes on from the second step of that run."""

    def run(name: str, world: str, *converters: str, resume: Run | None = None) -> Run:
        world_size, flags = WORLDS[world]
        folder = tmp_path / name
        if resume is not None:
            shutil.copytree(resume.folder / "checkpoint" / "step-2", folder / "checkpoint" / "step-2")
        result = start_from_seed(*STEPS, *converters, *flags, world_size=world_size, folder=folder)
        assert not result.error, result.error
        assert list(result.losses) == ([3, 4] if resume is not None else [1, 2, 3, 4])
        return result

    yield run
    shutil.rmtree(tmp_path)  # pytest would keep it for three sessions


def test_a_seed_checkpoint_is_that_of_an_unconverted_model(tmp_path):
    run = start("--model.name=llama4", "--model.flavor=tiny", *CREATE_SEED, FP8, folder=tmp_path / "fp8")
    assert not run.error, run.error
    assert "fp8moe: 2/2 expert modules" in run.log
    actual, expected = tensors_of(run.folder / "checkpoint" / "step-0"), tensors_of(seed_checkpoint("llama4", "tiny"))
    assert_same_tensors(actual, expected)
    assert {"/layers.1.moe.experts.w1", "/layers.3.moe.experts.w2"} <= expected.keys()


@in_each_world
def test_an_fp8_run_resumes_to_the_bit(run, world):
    whole = run("whole", world, FP8)
    resumed = run("resumed", world, FP8, resume=whole)
    assert resumed.losses[3] == whole.losses[3] and resumed.grad_norms[3] == whole.grad_norms[3]
    if world == "PP":
        # torchtitan's pipeline resumes with the same parameters, but its next steps differ in the last bits, as they do
        # with bf16 experts.
        assert resumed.losses[4] == pytest.approx(whole.losses[4], rel=1e-5)
        return
    assert resumed.losses[4] == whole.losses[4] and resumed.grad_norms[4] == whole.grad_norms[4]
    # Parameters and the optimizer's moments.
    assert_same_tensors(
        tensors_of(resumed.folder / "checkpoint" / "step-4"), tensors_of(whole.folder / "checkpoint" / "step-4")
    )


@in_each_world
@pytest.mark.parametrize(("first", "second"), [((), (FP8,)), ((FP8,), ())], ids=["bf16 to fp8", "fp8 to bf16"])
def test_bf16_and_fp8_runs_go_on_from_each_other(run, world, first, second):
    whole = run("whole", world, *first)
    resumed = run("resumed", world, *second, resume=whole)
    assert ("expert modules use FP8" in resumed.log) == bool(second)
    # Not the same numbers, or nothing was switched; and nearer than a step of training is long.
    assert any(resumed.losses[step] != whole.losses[step] for step in (3, 4))
    for step in (3, 4):
        assert resumed.losses[step] == pytest.approx(whole.losses[step], rel=1e-3)
        assert resumed.grad_norms[step] == pytest.approx(whole.grad_norms[step], rel=1e-2)
    actual, expected = (tensors_of(r.folder / "checkpoint" / "step-4") for r in (resumed, whole))
    assert {name: (value.shape, value.dtype) for name, value in actual.items()} == {
        name: (value.shape, value.dtype) for name, value in expected.items()
    }


# Not from a pipeline: torchtitan leaves its gradients, and so the optimizer's moments, larger by the number of tokens.
@pytest.mark.slow
@pytest.mark.parametrize("world", ["EP", "TP", "EP + FSDP"])
def test_a_parallel_run_goes_on_in_one_process(run, world):
    whole = run("whole", world, FP8)
    resumed = run("resumed", "one process", FP8, resume=whole)
    for step in (3, 4):
        assert resumed.losses[step] == pytest.approx(whole.losses[step], rel=2e-4)


@pytest.mark.parametrize("world", ["one process", pytest.param("EP", marks=pytest.mark.slow)])
def test_a_saved_model_loads_without_unpickling_code(run, world, tmp_path):
    world_size, flags = WORLDS[world]
    export = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    saved = {}
    for name, converters in (("bf16", ()), ("fp8", (FP8,))):
        result = start_from_seed(*export, *converters, *flags, world_size=world_size, folder=tmp_path / name)
        assert not result.error, result.error
        saved[name] = load(result.folder / "checkpoint" / "step-2", weights_only=True)
        assert {type(value) for value in saved[name].values()} == {torch.Tensor}
        assert {value.dtype for value in saved[name].values() if value.is_floating_point()} == {torch.bfloat16}
    shapes = {name: {key: value.shape for key, value in values.items()} for name, values in saved.items()}
    assert shapes["fp8"] == shapes["bf16"]
    # They were trained, each in its own way.
    assert not torch.equal(saved["fp8"]["layers.1.moe.experts.w1"], saved["bf16"]["layers.1.moe.experts.w1"])


def test_export_to_hugging_face_is_unchanged():
    spec = get_train_spec("llama4")
    args = copy.deepcopy(spec.model_args["debugmodel"])
    args.n_layers, args.dim, args.n_heads = 2, 64, 2
    args.update_from_config(JobConfig())
    args.moe_args.use_grouped_mm = True  # torchtitan turns it off where there is no SM90 GPU
    torch.manual_seed(0)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    adapter = spec.state_dict_adapter(args, None)
    expected = {name: value.clone() for name, value in adapter.to_hf(get_model_state_dict(model)).items()}

    assert convert_experts(model) == ["layers.1.moe.experts"]
    state_dict = get_model_state_dict(model)
    exported = adapter.to_hf(state_dict)
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in exported
    assert_same_tensors(exported, expected)
    # And back, into a converted model.
    imported = {name: value.clone() for name, value in adapter.from_hf(exported).items()}
    assert_same_tensors(imported, {name: state_dict[name] for name in imported})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    missing, unexpected = model.load_state_dict(imported, strict=False)
    assert not unexpected and not any("experts.w" in name for name in missing)
    assert_same_tensors(adapter.to_hf(get_model_state_dict(model)), expected)

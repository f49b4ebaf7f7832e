"""`python -m titan_fp8moe`, the doctor, and `python -m titan_fp8moe check`."""

import json
import platform
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torchtitan.protocols import model_converter

import titan_fp8moe
from titan_fp8moe import __main__, converter, ops

ROOT = Path(__file__).resolve().parents[1]
DEBUG_TOML = "train_configs/llama4_debug_fp8moe.toml"
LLAMA4 = '[model]\nname = "llama4"\nflavor = "debugmodel"\nconverters = ["fp8moe"]\n'
WITH_CONFIG_MODULE = f'[job]\ncustom_config_module = "titan_fp8moe.job_config"\n{LLAMA4}'


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    # The debug TOMLs name their assets from the repository root. Their shim would patch this process.
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "titan_fp8moe.cpu", types.ModuleType("titan_fp8moe.cpu"))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def pretend_gpu(monkeypatch):
    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")

    return pretend


# ---- doctor ----------------------------------------------------------------------------------------------------------

SQNR_NAMES = {"output", "grad_x", "grad_w1", "grad_w2", "grad_w3"}


def run_doctor(capsys, *flags: str) -> tuple[int, str]:
    status = __main__.main(list(flags))
    return status, capsys.readouterr().out


def assert_healthy(report: dict) -> None:
    assert report["verdict"] == "PASS" and report["problems"] == []
    assert report["converter_registered"] is True
    assert report["sqnr_db"].keys() == SQNR_NAMES
    # Exact arithmetic on e4m3 operands reaches some 23.6 dB; much more would mean that it was not FP8 that ran.
    assert all(22 <= db < 30 for db in report["sqnr_db"].values())
    versions = report["versions"]
    assert versions["titan_fp8moe"] == titan_fp8moe.__version__
    assert versions["python"] == platform.python_version()
    for package in ("torch", "triton", "torchtitan"):
        assert versions[package] == version(package)
    assert versions["cuda"] == (torch.version.cuda or "none")


def test_doctor_as_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "titan_fp8moe", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    # All of stdout is the report.
    report = json.loads(run.stdout)
    assert_healthy(report)
    assert report["device"]["type"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_doctor_says_which_implementation_each_op_takes(capsys, no_gpu):
    status, out = run_doctor(capsys, "--json")
    report = json.loads(out)
    assert status == 0
    assert_healthy(report)
    registered = {name for name in ops.__all__ if hasattr(torch.ops.titan_fp8moe, name)}
    assert report["implementations"].keys() == registered and "quantize_rowwise" in registered
    assert set(report["implementations"].values()) == {"reference (no CUDA device)"}


def test_doctor_in_words(capsys, no_gpu):
    status, out = run_doctor(capsys)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and lines[-1] == ["PASS"]
    assert ["torch", version("torch")] in lines
    assert ["converter", "registered:", "True"] in lines
    assert "FP8 is emulated here" in out
    db = {line[0]: float(line[1]) for line in lines if line and line[0] in SQNR_NAMES}
    assert db.keys() == SQNR_NAMES and min(db.values()) >= 22


def wrong_experts(kind: str):
    right = titan_fp8moe.float8_experts

    def experts(x, w1, w2, w3, offs, **options):
        if kind == "raises":
            raise RuntimeError("no kernel image is available")
        if kind == "swapped weights":
            return right(x, w3, w2, w1, offs, **options)
        out = right(x, w1, w2, w3, offs, **options)
        if kind == "wrong gradients":
            return out.detach() + (out - out.detach()) * 1.5
        return out * {"zeros": 0.0, "NaN": float("nan")}[kind]

    return experts


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("raises", "a small forward and backward failed: RuntimeError: no kernel image is available"),
        ("swapped weights", "output of a small experts op has an SQNR of "),
        ("wrong gradients", "grad_w2 of a small experts op has an SQNR of "),
        ("zeros", "output of a small experts op has an SQNR of 0.0 dB, at least 22.0 is expected"),
        ("NaN", "output of a small experts op has an SQNR of nan dB, at least 22.0 is expected"),
    ],
)
def test_doctor_fails_an_op_that_is_wrong(monkeypatch, capsys, no_gpu, kind, problem):
    monkeypatch.setattr(titan_fp8moe, "float8_experts", wrong_experts(kind))
    status, out = run_doctor(capsys, "--json")

    def refuse(constant: str):
        pytest.fail(f"{constant} is not JSON")

    report = json.loads(out, parse_constant=refuse)
    assert status == 1 and report["verdict"] == "FAIL"
    assert any(text.startswith(problem) for text in report["problems"])
    status, out = run_doctor(capsys)
    assert status == 1 and out.splitlines()[-1] == "FAIL" and f"problem: {problem}" in out


def test_doctor_fails_an_unregistered_converter(monkeypatch, capsys, no_gpu):
    monkeypatch.delitem(model_converter._registry_model_converter_cls, "fp8moe")
    status, out = run_doctor(capsys)
    assert status == 1 and out.splitlines()[-1] == "FAIL"
    assert 'problem: the converter "fp8moe" is not registered with torchtitan' in out


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_doctor_fails_a_gpu_without_fp8(monkeypatch, capsys, pretend_gpu, capability):
    pretend_gpu(*capability)
    monkeypatch.setattr(__main__, "_live_check", lambda device: dict.fromkeys(SQNR_NAMES, 23.0))
    status, out = run_doctor(capsys, "--json")
    report = json.loads(out)
    assert status == 1
    assert report["device"] == {"type": "cuda", "name": "Pretended GPU", "capability": "{}.{}".format(*capability)}
    (problem,) = report["problems"]
    assert "compute capability 9.0 is needed" in problem and "fp8moe.emulate = true" in problem
    assert "9.0" in report["implementations"]["scaled_grouped_mm"]


def test_doctor_refuses_flags_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(["--jsn"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err


# ---- check -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def check(tmp_path, capsys):
    """Runs the command on a TOML's path or text; its status and what it printed."""

    def check(toml: str, *flags: str) -> tuple[int, str]:
        if "\n" in toml:
            (tmp_path / "config.toml").write_text(toml)
            toml = str(tmp_path / "config.toml")
        capsys.readouterr()
        status = __main__.main(["check", toml, *flags])
        return status, capsys.readouterr().out

    return check


def assert_refused(result: tuple[int, str], message: str) -> None:
    status, out = result
    assert status == 1
    assert out.startswith("REFUSED ") and message in out and "OK" not in out.splitlines()


def test_check_as_a_command():
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "titan_fp8moe",
            "check",
            DEBUG_TOML,
            "--fp8moe.exclude_fqns=layers.3",
            "--compile.enable",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:4] == [
        "llama4 debugmodel: 2/3 expert modules",
        "  layers.1.moe.experts  experts 8, dim 256, hidden_dim 512",
        "  layers.3.moe.experts  experts 8, dim 256, hidden_dim 512  stays in bf16",
        "  layers.5.moe.experts  experts 8, dim 256, hidden_dim 512",
    ]
    assert lines[4].startswith("recipe rowwise, alignment 1, compiled with inductor, ")
    assert lines[5].startswith("note: fp8moe: each expert gets about 64 tokens at a time")
    assert lines[6:] == ["OK"]


def test_check_passes_flags_on(check, no_gpu):
    flags = ["--fp8moe.token_group_alignment", "32", "--fp8moe.recipe=rowwise_with_gw_hp", "--training.steps", "7"]
    status, out = check(DEBUG_TOML, *flags)
    assert status == 0
    assert "recipe rowwise_with_gw_hp, alignment 32, not compiled, no GPU here" in out
    assert check(DEBUG_TOML, "--compile.enable", "--compile.components=loss")[1].count("not compiled") == 1


@pytest.mark.parametrize(
    ("model", "flavor", "count"), [("deepseek_v3", "debugmodel", 5), ("qwen3", "debugmodel_moe", 8)]
)
def test_check_serves_other_models(check, model, flavor, count):
    status, out = check(WITH_CONFIG_MODULE, f"--model.name={model}", f"--model.flavor={flavor}")
    assert status == 0 and out.startswith(f"{model} {flavor}: {count}/{count} expert modules\n")


def test_check_leaves_torchtitans_flavors_alone(check, no_gpu):
    # The flavors are objects of the process, which a run in it would share.
    args = __main__.get_train_spec("llama4").model_args["debugmodel"]
    before = (args.moe_args.use_grouped_mm, args.max_seq_len)
    check(DEBUG_TOML, "--training.seq_len=99")
    assert (args.moe_args.use_grouped_mm, args.max_seq_len) == before


REFUSALS = {
    "missing file": ("missing.toml", [], "no such file: missing.toml"),
    "folder": ("train_configs", [], "no such file: train_configs"),
    "mistyped converter": (DEBUG_TOML, ["--model.converters=fp8me"], 'model.converters: "fp8me" does not exist; there'),
    "no converter": (WITH_CONFIG_MODULE.replace('"fp8moe"', ""), [], 'model.converters does not contain "fp8moe"'),
    "flavor": (
        DEBUG_TOML,
        ["--model.flavor=debug"],
        'model.flavor: llama4 has no "debug"; there are: debugmodel, 17bx16e',
    ),
    "model": (DEBUG_TOML, ["--model.name=llama5"], "llama5"),
    "no match": (
        DEBUG_TOML,
        ["--fp8moe.fqns=does.not.exist"],
        '"does.not.exist" matches no experts module; a pattern matches whole dotted components. This model has: '
        "layers.1.moe.experts, layers.3.moe.experts, layers.5.moe.experts",
    ),
    "excluded": (
        DEBUG_TOML,
        ["--fp8moe.exclude_fqns=layers"],
        "fp8moe.exclude_fqns ['layers'] leaves no experts module",
    ),
    "alignment": (
        DEBUG_TOML,
        ["--fp8moe.token_group_alignment=12"],
        "token_group_alignment must be one of (1, 16, 32), got 12",
    ),
    "recipe": (WITH_CONFIG_MODULE + '[fp8moe]\nrecipe = "rowise"\n', [], "fp8moe.recipe must be one of"),
    "mistyped key": (
        WITH_CONFIG_MODULE + "[fp8moe]\nfqn = []\n",
        [],
        '[fp8moe] has no key "fqn"; is "fqns" meant? Its keys are: recipe, fqns, exclude_fqns, ',
    ),
    "unknown key": (WITH_CONFIG_MODULE + "[fp8moe]\nx = 1\n", [], '[fp8moe] has no key "x". Its keys are: recipe, '),
    "TOML syntax": ("[model\n", [], "Expected ']'"),
    "config module": (WITH_CONFIG_MODULE.replace("titan_fp8moe.", "titan_fp8me."), [], "No module named 'titan_fp8me'"),
    "dense model": (DEBUG_TOML, ["--model.name=llama3"], "the model has no experts to convert"),
    "tensor parallel": (
        DEBUG_TOML,
        ["--parallelism.tensor_parallel_degree=64"],
        "hidden_dim 512 in 64 tensor parallel",
    ),
    "cached weights that FSDP gathers": (
        DEBUG_TOML,
        ["--fp8moe.cache_weights=always", "--parallelism.data_parallel_shard_degree=2"],
        'fp8moe.cache_weights is "always", but FSDP',
    ),
    "cached weights that change in backward": (
        DEBUG_TOML,
        ["--fp8moe.cache_weights=always", "--optimizer.early_step_in_backward"],
        'fp8moe.cache_weights is "always", but optimizer.early_step_in_backward',
    ),
    "no table": ("fp8moe = 3\n" + WITH_CONFIG_MODULE, [], "fp8moe must be a table, [fp8moe] and keys below it, got"),
    # torchtitan itself takes any string from a TOML.
    "dtype": (WITH_CONFIG_MODULE + '[training]\ndtype = "fp16"\n', [], "KeyError: 'fp16'"),
    "both": (
        DEBUG_TOML,
        ["--model.converters=fp8moe,quantize.grouped_mm.mx"],
        'converters "fp8moe" and "quantize.grouped_mm.mx" both quantise the grouped GEMMs',
    ),
}


@pytest.mark.filterwarnings("ignore:The field `fp8moe")
@pytest.mark.parametrize("name", REFUSALS)
def test_check_says_why_a_run_would_refuse(check, name):
    toml, flags, message = REFUSALS[name]
    assert_refused(check(toml, *flags), message)


@pytest.mark.parametrize("shards", ["-1", "1"])
def test_check_says_where_more_processes_are_refused(check, shards):
    flags = ["--fp8moe.cache_weights=always", f"--parallelism.data_parallel_shard_degree={shards}"]
    status, out = check(DEBUG_TOML, *flags)
    assert status == 0
    assert ("note: with more than one process the run is refused" in out) == (shards == "-1")


@pytest.mark.parametrize(
    ("flags", "few"),
    [
        (["--training.local_batch_size=2"], True),
        (["--training.local_batch_size=3"], False),
        # Gradients are accumulated, for which weights are cached unless FSDP gathers them.
        (["--training.local_batch_size=2", "--training.global_batch_size=8"], False),
        (["--training.local_batch_size=2", "--training.global_batch_size=8", "--fp8moe.cache_weights=never"], True),
        (
            [
                "--training.local_batch_size=2",
                "--training.global_batch_size=8",
                "--parallelism.data_parallel_shard_degree=2",
            ],
            True,
        ),
    ],
)
def test_check_says_where_bf16_is_faster(check, flags, few):
    # 8 of 64 experts a token, so 256 or 384 tokens an expert.
    flags = ["--model.name=qwen3", "--model.flavor=debugmodel_moe", "--training.seq_len=1024", *flags]
    status, out = check(WITH_CONFIG_MODULE, *flags)
    assert status == 0 and ("note: fp8moe: each expert gets about" in out) == few


def test_check_names_the_converters_that_exist(check):
    status, out = check(DEBUG_TOML, "--model.converters=fp8me")
    named = set(out.strip().split("there are: ")[1].split(", "))
    assert status == 1 and named == {
        "fp8moe",
        "quantize.linear.float8",
        "quantize.linear.mx",
        "quantize.grouped_mm.float8",
        "quantize.grouped_mm.mx",
    }


def test_check_refuses_a_flag_that_does_not_exist(check, capsys):
    with pytest.raises(SystemExit) as exit_info:
        check(DEBUG_TOML, "--fp8moe.fqn=experts")
    assert exit_info.value.code != 0
    assert "--fp8moe.fqn=experts" in capsys.readouterr().err


# ---- would the trainer know the converter? ---------------------------------------------------------------------------

NOT_REGISTERED = 'the trainer would not know the converter "fp8moe": set job.custom_config_module = '


@pytest.mark.parametrize("name", ["titan_fp8moe", "titan_fp8moe.cpu"])
def test_check_accepts_custom_import(check, name):
    status, out = check(f'[experimental]\ncustom_import = "{name}"\n{LLAMA4}')
    assert status == 0 and "3/3 expert modules" in out


@pytest.mark.parametrize(
    "toml",
    [
        LLAMA4,
        f'[experimental]\ncustom_import = "json"\n{LLAMA4}',
        # torchtitan copies this key's value to job.custom_config_module, after the one moment of importing that.
        f'[experimental]\ncustom_args_module = "titan_fp8moe.job_config"\n{LLAMA4}',
    ],
    ids=["nothing imported", "another module", "deprecated key"],
)
def test_check_refuses_what_the_trainer_would_not_know(check, toml):
    assert_refused(check(toml), NOT_REGISTERED)


@pytest.mark.parametrize("imports_us", [True, False])
def test_check_follows_a_config_module_in_the_working_directory(check, monkeypatch, tmp_path, imports_us):
    # As the trainer finds it, run by torchrun -m; a console script does not have that directory on its path.
    name = f"own_config_{imports_us}".lower()
    source = "from dataclasses import dataclass\n\n@dataclass\nclass JobConfig:\n    pass\n"
    (tmp_path / f"{name}.py").write_text(("import titan_fp8moe\n" if imports_us else "") + source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    # The package itself may be installed or only here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = check(f'[job]\ncustom_config_module = "{name}"\n{LLAMA4}')
    if imports_us:
        assert result[0] == 0, result[1]
    else:
        assert_refused(result, NOT_REGISTERED)


# ---- this machine's GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_check_refuses_a_gpu_without_fp8_for_that_reason(check, pretend_gpu, capability):
    pretend_gpu(*capability)
    assert_refused(check(DEBUG_TOML), "compute capability 9.0")


def test_check_accepts_an_emulated_gpu(check, pretend_gpu):
    pretend_gpu(8, 0)
    status, out = check(DEBUG_TOML, "--fp8moe.emulate")
    assert status == 0 and "backend reference\n" in out and "3/3" in out


def test_check_names_the_backend_of_a_gpu_with_fp8(check, pretend_gpu):
    pretend_gpu(9, 0)
    backend = converter.select_backend(titan_fp8moe.FP8MoE())
    status, out = check(DEBUG_TOML)
    assert status == 0 and backend != "reference" and f"not compiled, backend {backend}\n" in out

"""What is missing or wrong around the package is told in one sentence, by the doctor and by torchtitan's trainer."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_fp8moe import __main__, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DEBUG_TOML = "train_configs/llama4_debug_fp8moe.toml"
DOCTOR = ["-m", "titan_fp8moe"]
# What the trainer does of it until it would build the model.
TRAINER = ["-m", "torchtitan.train", "--job.config_file", DEBUG_TOML]


@pytest.fixture
def python(tmp_path):
    """Runs python with packages that claim other versions, and without one of them."""

    def python(
        arguments: list[str], versions: dict[str, str] | None = None, missing: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess:
        for package, version in (versions or {}).items():
            folder = tmp_path / f"{package}-{version}.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        if missing:
            (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
        paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables,
            capture_output=True,
            text=True,
        )

    return python


# ---- versions --------------------------------------------------------------------------------------------------------

WRONG_VERSIONS = {
    "torch missing": ({}, "torch", "torch>=2.10, which is not installed"),
    "triton missing": ({}, "triton", "triton>=3.6, which is not installed"),
    "torchtitan missing": ({}, "torchtitan", "torchtitan>=0.2.1,<0.3, which is not installed"),
    "torch too old": ({"torch": "2.9.1+cu128"}, None, "torch>=2.10, found 2.9.1+cu128"),
    "triton too old": ({"triton": "3.5.1"}, None, "triton>=3.6, found 3.5.1"),
    "torchtitan 0.1": ({"torchtitan": "0.1.0"}, None, "torchtitan>=0.2.1,<0.3, found 0.1.0"),
    "torchtitan 0.2.0": ({"torchtitan": "0.2.0"}, None, "torchtitan>=0.2.1,<0.3, found 0.2.0"),
    "torchtitan 0.3": ({"torchtitan": "0.3.0.dev20270101"}, None, "torchtitan>=0.2.1,<0.3, found 0.3.0.dev20270101"),
}


@pytest.mark.parametrize("name", WRONG_VERSIONS)
def test_a_wrong_version_is_one_sentence(python, name):
    versions, missing, found = WRONG_VERSIONS[name]
    sentence = f'titan_fp8moe needs {found}: pip install "{found.split(", ")[0]}"'
    for command in (DOCTOR, [*DOCTOR, "check", DEBUG_TOML]):
        run = python(command, versions, missing)
        assert run.returncode == 1 and run.stdout == ""
        assert sentence in run.stderr and run.stderr.count("\n") == 1
    imported = python(["-c", "import titan_fp8moe.job_config"], versions, missing)
    assert imported.returncode == 1
    assert imported.stderr.splitlines()[-1] == f"ImportError: {sentence}"


@pytest.mark.slow
def test_a_wrong_version_ends_the_trainer_with_that_sentence(python):
    run = python(TRAINER, {"triton": "3.5.1"}, LOCAL_RANK="0")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: titan_fp8moe needs triton>=3.6, found 3.5.1: ")


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.10.0a0+git1234", "triton": "3.6.0.post1", "torchtitan": "0.2.1"},
        {"torch": "2.10", "triton": "3.6", "torchtitan": "0.2.10.dev20260101"},
        {"torch": "3.0.0+cu140", "triton": "10.0.0"},
        {},
    ],
    ids=str,
)
def test_a_right_version_is_none(python, versions):
    # The file alone, without the imports that follow it in the package.
    code = "import runpy; print(runpy.run_path('titan_fp8moe/environment.py')['version_problem']())"
    run = python(["-c", code], versions)
    assert run.stdout == "None\n", run.stderr


def test_versions_are_those_of_the_package_metadata():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package, (oldest, too_new) in environment.VERSIONS.items():
        assert f"{package}>={oldest}" + (f",<{too_new}" if too_new else "") in dependencies


# ---- devices ---------------------------------------------------------------------------------------------------------

NO_GPU = "titan_fp8moe: torch sees no GPU: check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build, or "


@pytest.mark.parametrize(
    ("rank", "count", "sentence"),
    [
        (None, 1, None),
        ("0", 1, None),
        ("7", 8, None),
        ("8", 8, "LOCAL_RANK is 8, but torch sees 8 GPU(s): start at most 8 process(es) on this node"),
        ("1", 1, "LOCAL_RANK is 1, but torch sees 1 GPU(s): start at most 1 process(es) on this node"),
        (None, 0, NO_GPU.removeprefix("titan_fp8moe: ")),
        ("0", 0, NO_GPU.removeprefix("titan_fp8moe: ")),
    ],
)
def test_a_rank_without_a_device(monkeypatch, rank, count, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    problem = environment.device_problem()
    assert problem is None if sentence is None else problem.startswith(sentence)


def test_doctor_fails_a_rank_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
    monkeypatch.setattr(__main__, "_live_check", lambda device: {"output": 23.0})
    for rank, status in (("1", 0), ("2", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert __main__.main(["--json"]) == status
        problems = json.loads(capsys.readouterr().out)["problems"]
        assert problems == [environment.device_problem()] * status


# A CPU build of torch, or a node with fewer GPUs than processes, in the place where the trainer fails of it.
NO_DEVICE = "import torch, titan_fp8moe.job_config\ntorch.cuda.device_count = lambda: {}\ntorch.cuda.set_device(5)\n"


@pytest.mark.parametrize(
    ("count", "sentence"),
    [(0, NO_GPU), (2, "titan_fp8moe: LOCAL_RANK is 5, but torch sees 2 GPU(s): start at most 2 process(es)")],
)
def test_a_process_that_gets_no_device_ends_in_one_sentence(python, count, sentence):
    run = python(["-c", NO_DEVICE.format(count)], CUDA_VISIBLE_DEVICES="", LOCAL_RANK="5")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(sentence) and run.stderr.count("titan_fp8moe: ") == 1


def test_the_trainer_without_a_gpu_ends_in_one_sentence(python, tmp_path):
    toml = tmp_path / "config.toml"
    toml.write_text((ROOT / DEBUG_TOML).read_text().replace('custom_import = "titan_fp8moe.cpu"', ""))
    run = python([*TRAINER[:-1], str(toml)], CUDA_VISIBLE_DEVICES="", LOCAL_RANK="0")
    assert run.returncode == 1
    remedy = 'set experimental.custom_import = "titan_fp8moe.cpu" to train on the CPU'
    assert run.stderr.splitlines()[-1] == NO_GPU + remedy


@pytest.mark.parametrize(
    "code",
    [
        "import titan_fp8moe.job_config, titan_fp8moe.cpu",
        # Another fault than that of a device.
        "import titan_fp8moe.job_config, torch; torch.ones(2) @ torch.ones(3)",
    ],
)
def test_nothing_is_said_without_need(python, code):
    run = python(["-c", code], CUDA_VISIBLE_DEVICES="", LOCAL_RANK="5")
    assert "torch sees" not in run.stderr and "Warning: titan_fp8moe" not in run.stderr


# ---- TOML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[model\n", "the file is not TOML: Expected ']'"),
        (b"a = 1\na = 2\n", "the file is not TOML: "),
        (b"\xff\xfe[\0", "the file is not TOML: 'utf-8' codec can't decode byte 0xff"),
        (None, "the file cannot be read: Permission denied"),
    ],
    ids=["syntax", "a key twice", "not text", "no permission"],
)
def test_an_unreadable_toml_is_one_sentence(monkeypatch, capfd, tmp_path, content, reason):
    path = tmp_path / "config.toml"
    path.write_bytes(content or b"")
    if content is None:
        # Root may read every file.
        def denied(file, *args, **kwargs):
            if str(file) == str(path):
                raise PermissionError(13, "Permission denied")
            return opened(file, *args, **kwargs)

        opened = builtins.open
        monkeypatch.setattr(builtins, "open", denied)
    assert __main__.main(["check", str(path)]) == 1
    out, err = capfd.readouterr()
    assert out.startswith(f"REFUSED {path}: {reason}") and out.count("\n") == 1 and err == ""


def test_an_unreadable_toml_ends_the_trainer_with_torchtitans_sentence(python, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[model\n")
    run = python([*TRAINER[:-1], str(path)], LOCAL_RANK="0")
    assert run.returncode == 1
    assert "TOMLDecodeError: Expected ']'" in run.stderr.splitlines()[-1]

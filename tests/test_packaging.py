"""`python -m titan_fp8moe init`, and the wheel: what a user has who has no repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

import titan_fp8moe
from titan_fp8moe import __main__

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
ASSETS = ["assets/corpus/corpus.jsonl", "assets/tokenizer/tokenizer.json", "assets/tokenizer/tokenizer_config.json"]
TIMEOUT_S = 400


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---- init ------------------------------------------------------------------------------------------------------------


def test_init_writes_a_run_whose_paths_exist(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "new" / "run one"
    assert __main__.main(["init", str(folder)]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == (
        f"cd '{folder}' && torchrun --nproc_per_node=1 -m torchtitan.train --job.config_file llama4_debug_fp8moe.toml"
    )
    assert files_in(folder) == sorted(CONFIGS + ASSETS)
    for name in ASSETS:
        assert (folder / name).read_bytes() == (ROOT / "tests" / name).read_bytes()
    monkeypatch.chdir(folder)
    for name in CONFIGS:
        text = (folder / name).read_text()
        assert "tests/" not in text
        if "debug" in name:
            config = tomllib.loads(text)
            assert (folder / config["model"]["hf_assets_path"] / "tokenizer.json").is_file()
            assert (folder / config["training"]["dataset_path"] / "corpus.jsonl").is_file()
    # Nothing else of a TOML changes.
    job_config = ConfigManager().parse_args(["--job.config_file", "llama4_debug_fp8moe.toml"])
    assert job_config.model.converters == ["fp8moe"] and job_config.training.steps == 30


@pytest.mark.parametrize("existing", ["llama4_debug_bf16.toml", "assets/corpus/corpus.jsonl"])
def test_init_overwrites_nothing(tmp_path, capsys, existing):
    (tmp_path / existing).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / existing).write_text("mine")
    (tmp_path / "other.txt").write_text("may stay")
    assert __main__.main(["init", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        f"REFUSED {tmp_path}: {existing} already there, and nothing is overwritten; name an empty or a new directory\n"
    )
    assert files_in(tmp_path) == sorted([existing, "other.txt"])
    assert (tmp_path / existing).read_text() == "mine"


def test_init_refuses_what_is_no_directory(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert __main__.main(["init", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().out.startswith(f"REFUSED {tmp_path / 'file'}: ")


def test_init_needs_a_directory():
    with pytest.raises(SystemExit) as exit:
        __main__.main(["init"])
    assert exit.value.code == 2


# ---- the wheel -------------------------------------------------------------------------------------------------------


def build(kind: str, source: Path, folder: Path) -> Path:
    """By the build backend that pyproject.toml names, as pip and build call it; needs no network."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution, as `python -m build` does, from a copy: building writes into the source."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend, setuptools >= 77, is not installed")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("titan_fp8moe", "train_configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build("sdist", source, tmp_path_factory.mktemp("sdist"))
    # Python before 3.10.12 and 3.11.4 has no filters.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    shutil.unpack_archive(sdist, tmp_path_factory.getbasetemp() / "unpacked", **options)
    (unpacked,) = (tmp_path_factory.getbasetemp() / "unpacked").iterdir()
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """The environment of a process that has the wheel's package and not the repository's."""
    site = tmp_path_factory.mktemp("site")
    # All that installing a wheel of Python files means.
    zipfile.ZipFile(wheel).extractall(site)
    return os.environ | {
        "PYTHONPATH": str(site),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hf_home")),
    }


def test_wheel_holds_the_package_and_nothing_of_the_tests(wheel):
    assert wheel.name == f"titan_fp8moe-{titan_fp8moe.__version__}-py3-none-any.whl"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    package = ROOT / "titan_fp8moe"
    python = [f"titan_fp8moe/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")]
    data = [f"titan_fp8moe/train_configs/{name}" for name in CONFIGS] + [f"titan_fp8moe/{name}" for name in ASSETS]
    assert sorted(names) == sorted([*python, *data, "titan_fp8moe/py.typed"])


@pytest.mark.slow
def test_wheel_serves_a_stranger_from_doctor_to_training(installed, tmp_path):
    def run(command: str) -> str:
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    where = run(f"{sys.executable} -c 'import titan_fp8moe; print(titan_fp8moe.__file__)'")
    assert where.startswith(installed["PYTHONPATH"])
    assert run(f"{sys.executable} -m titan_fp8moe").splitlines()[-1] == "PASS"
    command = run(f"{sys.executable} -m titan_fp8moe init run").splitlines()[-1]
    log = run(f"{command} --training.steps=2 --training.seq_len=128")
    assert "fp8moe: 3/3 expert modules" in log and "Training completed" in log
    assert re.findall(r"step: +(\d+) .*loss: ", log) == ["1", "2"]

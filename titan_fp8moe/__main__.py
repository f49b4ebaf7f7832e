"""``python -m titan_fp8moe``: is this machine ready? ``check FILE.toml``: is this TOML? ``init DIR``: begin here."""

import argparse
import copy
import difflib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import torch
import torchtitan.components.quantization  # noqa: F401  (registers torchtitan's own converters)
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

import titan_fp8moe
from titan_fp8moe import converter, environment, ops, training_run
from titan_fp8moe.float8 import is_hopper
from titan_fp8moe.job_config import FP8MoE

MIN_SQNR_DB = 22.0
"""Below this a whole experts op is wrong: exact arithmetic on e4m3 operands gives 23.6 dB on normal data."""


class Refusal(Exception):
    """A sentence for the user: why a run would not start."""


# ---- doctor ----------------------------------------------------------------------------------------------------------


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _implementations(device: torch.device) -> dict[str, str]:
    """Which implementation each operator takes on ``device``, and why."""
    if device.type == "cpu":
        reason = "no CUDA device"
    else:
        reason = "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    others = "triton" if is_hopper(device) else "reference"
    implementations = {}
    for name in ops.__all__:
        if isinstance(getattr(ops, name), ops.Operator):
            implementations[name] = f"{others} ({reason})"
    try:
        gemm = f"{ops.resolve_gemm_backend('auto', device)} ({reason})"
        implementations["scaled_grouped_mm"] = gemm
        implementations["grouped_mm_wgrad"] = gemm if device.type == "cpu" else f"torch ({reason})"
    except RuntimeError as error:
        implementations["scaled_grouped_mm"] = implementations["grouped_mm_wgrad"] = f"none: {error}"
    return implementations


def _sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return (10 * torch.log10(expected.square().sum() / (expected - actual.float()).square().sum())).item()


def _live_check(device: torch.device) -> dict[str, float]:
    """SQNR in dB against float32 of the experts' output and gradients, on groups of odd sizes and an empty one."""
    backend = "auto" if device.type == "cpu" or is_hopper(device) else "reference"
    dim, hidden_dim = 256, 384
    sizes = torch.tensor([100, 0, 1, 155])
    offs = torch.cumsum(sizes, 0, dtype=torch.int32).to(device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    x = normal(256, dim).requires_grad_()
    w1, w3 = (normal(4, hidden_dim, dim).mul(dim**-0.5).requires_grad_() for _ in range(2))
    w2 = normal(4, dim, hidden_dim).mul(hidden_dim**-0.5).requires_grad_()
    inputs, grad = (x, w1, w2, w3), normal(256, dim)
    out = titan_fp8moe.float8_experts(x, w1, w2, w3, offs, gemm_backend=backend)
    actual = (out, *torch.autograd.grad(out, inputs, grad))

    inputs32 = [t.detach().float().requires_grad_() for t in inputs]
    pieces = []
    for e, tokens in enumerate(inputs32[0].split(sizes.tolist())):
        gate, up = tokens @ inputs32[1][e].t(), tokens @ inputs32[3][e].t()
        pieces.append((torch.nn.functional.silu(gate) * up) @ inputs32[2][e].t())
    out32 = torch.cat(pieces)
    expected = (out32, *torch.autograd.grad(out32, inputs32, grad.float()))
    names = ("output", "grad_x", "grad_w1", "grad_w2", "grad_w3")
    return {name: round(_sqnr_db(a, b), 2) for name, a, b in zip(names, actual, expected, strict=True)}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def doctor(as_json: bool) -> int:
    """Print what a bug report needs; 0 when FP8 experts work here, else 1."""
    device = _device()
    problems = []
    report = {
        "versions": {
            "titan_fp8moe": titan_fp8moe.__version__,
            "python": platform.python_version(),
            **{name: _version_of(name) for name in ("torch", "triton", "torchtitan", "torchao")},
            "cuda": torch.version.cuda or "none",
        },
        "device": {"type": device.type, "name": platform.processor() or platform.machine()},
        "converter_registered": converter.CONVERTER_NAME in model_converter._registry_model_converter_cls,
        "implementations": _implementations(device),
    }
    if device.type == "cuda":
        report["device"]["name"] = torch.cuda.get_device_name(device)
        report["device"]["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        if not is_hopper(device):
            problems.append(
                "this GPU has no FP8 grouped GEMM (compute capability 9.0 is needed); set fp8moe.emulate = true to "
                "run the slow reference"
            )
        if problem := environment.device_problem():
            problems.append(problem)
    if not report["converter_registered"]:
        problems.append(f'the converter "{converter.CONVERTER_NAME}" is not registered with torchtitan')
    try:
        report["sqnr_db"] = _live_check(device)
        problems += [
            f"{name} of a small experts op has an SQNR of {db} dB, at least {MIN_SQNR_DB} is expected"
            for name, db in report["sqnr_db"].items()
            if not db >= MIN_SQNR_DB
        ]
    except Exception as error:  # Whatever it is, the report must still come out.
        problems.append(f"a small forward and backward failed: {type(error).__name__}: {error}")
    report["problems"], report["verdict"] = problems, "FAIL" if problems else "PASS"

    if as_json:
        # JSON has no NaN and no infinity.
        finite = {name: db if math.isfinite(db) else str(db) for name, db in report.get("sqnr_db", {}).items()}
        print(json.dumps(report | {"sqnr_db": finite}, indent=2, allow_nan=False))
    else:
        for section in ("versions", "device", "implementations", "sqnr_db"):
            print(section)
            for name, value in report.get(section, {}).items():
                print(f"  {name:40} {value}")
        print(f"converter registered: {report['converter_registered']}")
        if device.type == "cpu":
            print("no CUDA device: FP8 is emulated here, which is for tests and not for speed")
        for problem in problems:
            print(f"problem: {problem}")
        print(report["verdict"])
    return 1 if problems else 0


# ---- check -----------------------------------------------------------------------------------------------------------


def _check_readable(toml: str) -> None:
    # torchtitan reads it too, but logs a traceback when it cannot.
    if not os.path.isfile(toml):
        raise Refusal(f"no such file: {toml}")
    try:
        with open(toml, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise Refusal(f"the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Refusal(f"the file is not TOML: {error}") from error
    section, job = table.get(converter.CONVERTER_NAME, {}), table.get("job", {})
    if not isinstance(section, dict):
        # torchtitan ignores it with a warning.
        raise Refusal(f"fp8moe must be a table, [fp8moe] and keys below it, got fp8moe = {section!r}")
    if not isinstance(job, dict) or job.get("custom_config_module") != "titan_fp8moe.job_config":
        return  # the section may be of the user's own making
    keys = [field.name for field in fields(FP8MoE)]
    for key in section:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            meant = f'; is "{near[0]}" meant?' if near else "."
            raise Refusal(f'[fp8moe] has no key "{key}"{meant} Its keys are: {", ".join(keys)}')


def _check_registration(job_config: JobConfig) -> None:
    registered = model_converter._registry_model_converter_cls
    for name in job_config.model.converters:
        if name not in registered:
            raise Refusal(f'model.converters: "{name}" does not exist; there are: {", ".join(registered)}')
    if converter.CONVERTER_NAME not in job_config.model.converters:
        raise Refusal(f'model.converters does not contain "{converter.CONVERTER_NAME}": nothing would be converted')
    # This process has the converter anyway; would the trainer's?
    imported = [job_config.experimental.custom_import]
    # The old name of this key is copied to the new one, but torchtitan imports no module by it.
    if not job_config.experimental.custom_args_module:
        imported.append(job_config.job.custom_config_module)
    imported = [name for name in imported if name]
    if any(name.split(".")[0] == "titan_fp8moe" for name in imported):
        return
    code = f"import {', '.join(['sys', *imported])}; sys.exit('titan_fp8moe' not in sys.modules)"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != 0:
        raise Refusal(
            f'the trainer would not know the converter "{converter.CONVERTER_NAME}": set job.custom_config_module = '
            '"titan_fp8moe.job_config", or experimental.custom_import = "titan_fp8moe" next to a config module of '
            "your own"
        )


def _build_model(job_config: JobConfig) -> torch.nn.Module:
    try:
        spec = get_train_spec(job_config.model.name)
    except ValueError as error:
        raise Refusal(f"model.name: {error} torchtitan's own are: {', '.join(sorted(_supported_models))}") from None
    if job_config.model.flavor not in spec.model_args:
        raise Refusal(
            f'model.flavor: {job_config.model.name} has no "{job_config.model.flavor}"; there are: '
            f"{', '.join(spec.model_args)}"
        )
    model_args = copy.deepcopy(spec.model_args[job_config.model.flavor])
    moe_args = getattr(model_args, "moe_args", None)
    use_grouped_mm = moe_args is not None and moe_args.use_grouped_mm
    gpu_elsewhere = moe_args is not None and not torch.cuda.is_available()
    if gpu_elsewhere:
        # torchtitan turns grouped GEMMs off, with a warning, where there is no SM90 GPU; the question is about a
        # machine with one.
        moe_args.use_grouped_mm = False
    model_args.update_from_config(job_config)
    if gpu_elsewhere:
        moe_args.use_grouped_mm = use_grouped_mm
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(model_args)


def check(toml: str, flags: list[str]) -> int:
    """Print what a run of ``toml`` would convert, or why it would refuse; 0 or 1. Needs no GPU."""
    try:
        _check_readable(toml)
        # The trainer runs as python -m, which finds modules in the working directory; a console script does not.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        job_config = ConfigManager().parse_args(["--job.config_file", toml, *flags])
        if job_config.experimental.custom_import:
            importlib.import_module(job_config.experimental.custom_import)
        _check_registration(job_config)
        config = converter.read_config(job_config)
        model = _build_model(job_config)
        # First: on a GPU without FP8 grouped GEMM torchtitan turns grouped GEMMs off, which is not the reason to give.
        if torch.cuda.is_available():
            backend = f"backend {converter.select_backend(config)}"
        else:
            backend = "no GPU here: whether the target has FP8 grouped GEMMs was not checked"
        selected = converter.select_experts(
            model, config, hidden_dim_shards=training_run.hidden_dim_shards_of(job_config)
        )
        parallel_dims = training_run.smallest_parallel_dims(job_config)
        cached = training_run.weights_are_cached(config, job_config, parallel_dims)
    except (Refusal, ValueError, TypeError, RuntimeError, ImportError) as error:
        print(f"REFUSED {toml}: {error}")
        return 1
    except Exception as error:  # from torchtitan, the model or the user's own modules, as the trainer would meet it
        print(f"REFUSED {toml}: {type(error).__name__}: {error}")
        return 1

    experts = converter.find_experts(model)
    compile_backend = training_run.compile_backend_of(job_config)
    print(f"{job_config.model.name} {job_config.model.flavor}: {len(selected)}/{len(experts)} expert modules")
    for fqn, module in experts.items():
        num_experts, hidden_dim, dim = module.w1.shape
        kept = "" if fqn in selected else "  stays in bf16"
        print(f"  {fqn}  experts {num_experts}, dim {dim}, hidden_dim {hidden_dim}{kept}")
    print(
        f"recipe {config.recipe}, alignment {config.token_group_alignment}, "
        f"{f'compiled with {compile_backend}' if compile_backend else 'not compiled'}, {backend}"
    )
    if not cached and (warning := training_run.few_tokens_warning(model, selected, job_config)) is not None:
        print(f"note: {warning}")
    if config.cache_weights == "always" and job_config.parallelism.data_parallel_shard_degree == -1:
        print('note: with more than one process the run is refused, because FSDP is on and cache_weights is "always"')
    print("OK")
    return 0


# ---- init ------------------------------------------------------------------------------------------------------------

ASSETS_IN_REPOSITORY = "tests/assets"
DEBUG_TOML = "llama4_debug_fp8moe.toml"


def _shipped_files() -> tuple[Path, Path]:
    """The folders of TOMLs and of assets: in the installed package, or in the repository it runs from."""
    package = Path(titan_fp8moe.__file__).parent
    if (package / "assets").is_dir():
        return package / "train_configs", package / "assets"
    return package.parent / "train_configs", package.parent / ASSETS_IN_REPOSITORY


def init(folder: str) -> int:
    """Write the TOMLs, and the tokenizer and corpus of the debug ones, into ``folder``; print how to train; 0 or 1."""
    target = Path(folder)
    configs, assets = _shipped_files()
    sources = {toml.name: toml for toml in sorted(configs.glob("*.toml"))}
    sources |= {f"assets/{f.relative_to(assets)}": f for f in sorted(assets.glob("*/*.json*"))}
    try:
        existing = [name for name in sources if os.path.lexists(target / name)]
        if existing:
            raise Refusal(
                f"{', '.join(existing)} already there, and nothing is overwritten; name an empty or a new directory"
            )
        for name, source in sources.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".toml":
                toml = source.read_text(encoding="utf-8").replace(f"./{ASSETS_IN_REPOSITORY}/", "./assets/")
                (target / name).write_text(toml, encoding="utf-8")
            else:
                shutil.copyfile(source, target / name)
    except (Refusal, OSError) as error:
        print(f"REFUSED {folder}: {error}")
        return 1
    print(f"{folder}: {', '.join(sources)}")
    print("To train the debug model, on a GPU or, with emulated FP8, on a CPU:")
    print(f"cd {shlex.quote(folder)} && torchrun --nproc_per_node=1 -m torchtitan.train --job.config_file {DEBUG_TOML}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="titan-fp8moe", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the doctor's report as JSON, for bug reports")
    commands = parser.add_subparsers(dest="command", metavar="{check,init}")
    check_parser = commands.add_parser(
        "check",
        help="what a run of a TOML would convert, or why it would refuse",
        allow_abbrev=False,
    )
    check_parser.add_argument("toml", metavar="FILE.toml")
    init_parser = commands.add_parser(
        "init",
        help="write a TOML that is ready to run, its tokenizer and its data into a directory",
        allow_abbrev=False,
    )
    init_parser.add_argument("folder", metavar="DIR")
    # Everything that follows the file belongs to torchtitan.
    args, flags = parser.parse_known_args(argv)
    if args.command == "check":
        return check(args.toml, flags)
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if args.command == "init":
        return init(args.folder)
    return doctor(args.json)


if __name__ == "__main__":
    sys.exit(main())

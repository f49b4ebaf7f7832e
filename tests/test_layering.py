"""Which file of the package may import which, and what else is kept to one place; read from the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "titan_fp8moe"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# What each module may import of the package. Imports point one way; an entry point may import anything.
ALLOWED = {
    "__init__": None,
    "__main__": None,
    "cpu": set(),
    "environment": set(),
    "float8": set(),
    "job_config": set(),
    "kernels": {"kernels"},
    "reference": {"float8"},
    "ops": {"ops", "kernels", "reference", "float8"},
    "grouped_mm": {"ops"},
    "experts": {"ops", "grouped_mm"},
    "weight_cache": set(),
    "modules": {"experts", "weight_cache"},
    "numerics_log": {"modules", "ops"},
    "training_run": {"job_config"},
    "converter": {
        "modules",
        "experts",
        "weight_cache",
        "numerics_log",
        "training_run",
        "job_config",
        "ops",
        "float8",
    },
}
TORCHTITAN_USERS = {"modules", "numerics_log", "training_run", "converter", "cpu", "__main__"}
KERNEL_LIBRARIES = {"triton"} | sys.stdlib_module_names
MAX_LINES = {"ops.py": 600}


def layer_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names, wherever in the file they are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports here are absolute"
            # "from titan_fp8moe import ops" imports titan_fp8moe.ops.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(file: str, tree: ast.AST) -> list[str]:
    layer = layer_of(file)
    forbidden = []
    for name in imported_modules(tree):
        library, _, rest = name.partition(".")
        if library == "titan_fp8moe":
            allowed = ALLOWED[layer]
            if allowed is not None and rest.split(".")[0] not in allowed:
                forbidden.append(name)
        elif (library == "torchtitan" and layer not in TORCHTITAN_USERS) or (
            layer == "kernels" and library not in KERNEL_LIBRARIES
        ):
            forbidden.append(name)
    return forbidden


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that use os.environ or os.getenv, under any alias of os."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & {"environ", "getenv"})
    ]


def patched_modules(tree: ast.AST) -> list[str]:
    """Assignments to an attribute of something that was imported: monkeypatching."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    patched = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                patched.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            target = ast.unparse(node.args[0]).split(".")[0]
            if target in imported:
                patched.append(ast.unparse(node))
    return patched


@pytest.fixture(params=FILES)
def file(request) -> str:
    return request.param


@pytest.fixture
def tree(file) -> ast.Module:
    return ast.parse(FILES[file].read_text(), file)


def test_every_file_has_its_layer():
    assert {layer_of(file) for file in FILES} == ALLOWED.keys()


def test_imports_point_one_way(file, tree):
    assert forbidden_imports(file, tree) == []


def test_environment_is_read_in_the_cpu_shim_alone(file, tree):
    if file != "cpu.py":
        assert environment_reads(tree) == []


def test_nothing_is_monkeypatched_outside_the_cpu_shim(file, tree):
    if file != "cpu.py":
        assert patched_modules(tree) == []


def test_files_stay_small(file):
    lines = len(FILES[file].read_text().splitlines())
    assert lines <= MAX_LINES.get(file, 400), f"{file} has {lines} lines: one subject a file, near 300 lines"


def test_config_module_has_real_annotations():
    # Postponed annotations are strings, in which torchtitan's merge finds no dataclass.
    tree = ast.parse(FILES["job_config.py"].read_text())
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("float8.py", "import titan_fp8moe", ["titan_fp8moe"]),
        ("float8.py", "from titan_fp8moe import reference", ["titan_fp8moe.reference"]),
        ("reference.py", "def f():\n    from titan_fp8moe.ops import x", ["titan_fp8moe.ops.x"]),
        ("ops.py", "from titan_fp8moe.experts import y", ["titan_fp8moe.experts.y"]),
        ("ops.py", "import torchtitan.tools as tools", ["torchtitan.tools"]),
        ("ops.py", "from titan_fp8moe.kernels.scale import z\nfrom titan_fp8moe import float8", []),
        ("kernels/a.py", "from titan_fp8moe.kernels.b import c\nimport triton.language as tl", []),
        ("kernels/a.py", "from titan_fp8moe.float8 import FP8_MAX", ["titan_fp8moe.float8.FP8_MAX"]),
        ("kernels/a.py", "import numpy", ["numpy"]),
    ],
)
def test_forbidden_imports_are_found(file, source, expected):
    assert forbidden_imports(file, ast.parse(source)) == expected


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"]
)
def test_environment_reads_are_found(source):
    assert environment_reads(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.histc = f", True),
        ("from torchtitan.tools import utils\nutils.a.b = 1", True),
        ("import torch\nsetattr(torch, 'histc', f)", True),
        ("import torch\ndef f(module):\n    module.histc = torch.histc", False),
    ],
)
def test_monkeypatching_is_found(source, found):
    assert bool(patched_modules(ast.parse(source))) == found

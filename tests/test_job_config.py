"""The [fp8moe] section through torchtitan's own ConfigManager, from TOML and from flags."""

import ast
import dataclasses
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager, JobConfig

from titan_fp8moe import FP8MoE, converter
from titan_fp8moe import job_config as job_config_module

CONFIG_MODULE = '[job]\ncustom_config_module = "titan_fp8moe.job_config"\n'
EVERY_KEY = """
[fp8moe]
recipe = "rowwise_with_gw_hp"
fqns = ["layers.*.moe.experts"]
exclude_fqns = ["layers.0", "layers.1"]
token_group_alignment = 32
round_scales_to_power_of_2 = false
fast_accum = "forward"
gemm_backend = "torch"
cache_weights = "never"
emulate = true
log_numerics_freq = 10
"""
EVERY_VALUE = FP8MoE(
    recipe="rowwise_with_gw_hp",
    fqns=["layers.*.moe.experts"],
    exclude_fqns=["layers.0", "layers.1"],
    token_group_alignment=32,
    round_scales_to_power_of_2=False,
    fast_accum="forward",
    gemm_backend="torch",
    cache_weights="never",
    emulate=True,
    log_numerics_freq=10,
)


@pytest.fixture
def parse(tmp_path: Path):
    def parse(toml: str, *flags: str) -> JobConfig:
        path = tmp_path / "config.toml"
        path.write_text(toml)
        return ConfigManager().parse_args(["--job.config_file", str(path), *flags])

    return parse


def test_toml_sets_every_key(parse):
    for field in fields(FP8MoE):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert getattr(EVERY_VALUE, field.name) != default, f"{field.name}: a lost value would go unseen"
    assert converter.read_config(parse(CONFIG_MODULE + EVERY_KEY)) == EVERY_VALUE


@pytest.mark.parametrize("section", ["", "[fp8moe]\n"], ids=["no section", "empty section"])
def test_every_key_is_optional(parse, section):
    expected = {
        "recipe": "rowwise",
        "fqns": ["experts"],
        "exclude_fqns": [],
        "token_group_alignment": 1,
        "round_scales_to_power_of_2": True,
        "fast_accum": "all",
        "gemm_backend": "auto",
        "cache_weights": "auto",
        "emulate": False,
        "log_numerics_freq": 0,
    }
    assert dataclasses.asdict(converter.read_config(parse(CONFIG_MODULE + section))) == expected


def test_defaults_apply_where_the_config_has_no_such_section(parse):
    job_config = parse('[experimental]\ncustom_import = "titan_fp8moe"\n[model]\nconverters = ["fp8moe"]\n')
    assert not hasattr(job_config, "fp8moe")
    assert converter.read_config(job_config) == FP8MoE()


def test_the_section_is_added_and_nothing_else_changes(parse):
    without = dataclasses.asdict(parse('[model]\nname = "llama4"\n'))
    assert "fp8moe" not in without
    with_section = dataclasses.asdict(parse(CONFIG_MODULE + '[model]\nname = "llama4"\n'))
    assert with_section.pop("fp8moe") == dataclasses.asdict(FP8MoE())
    assert with_section["job"].pop("custom_config_module") == "titan_fp8moe.job_config"
    without["job"].pop("custom_config_module")
    for config in (without, with_section):
        config["job"].pop("config_file")
    assert with_section == without


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--fp8moe.fqns=a,b"], {"fqns": ["a", "b"]}),
        (["--fp8moe.fqns", "layers.*.moe.experts"], {"fqns": ["layers.*.moe.experts"]}),
        (["--fp8moe.exclude_fqns=layers.0,layers.1"], {"exclude_fqns": ["layers.0", "layers.1"]}),
        (["--fp8moe.token_group_alignment", "32"], {"token_group_alignment": 32}),
        (["--fp8moe.recipe=rowwise_with_gw_hp"], {"recipe": "rowwise_with_gw_hp"}),
        (["--fp8moe.fast_accum", "none"], {"fast_accum": "none"}),
        (["--fp8moe.gemm_backend=torch"], {"gemm_backend": "torch"}),
        (["--fp8moe.cache_weights=always"], {"cache_weights": "always"}),
        (["--fp8moe.emulate"], {"emulate": True}),
        (["--fp8moe.log_numerics_freq=10"], {"log_numerics_freq": 10}),
        (["--fp8moe.no_round_scales_to_power_of_2"], {"round_scales_to_power_of_2": False}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_flag_sets_a_key(parse, flags, expected):
    config = converter.read_config(parse(CONFIG_MODULE, *flags))
    assert config == dataclasses.replace(FP8MoE(), **expected)


def test_flags_override_the_toml_and_leave_its_other_keys(parse):
    flags = ["--fp8moe.fqns=a,b", "--fp8moe.token_group_alignment", "16", "--fp8moe.no_emulate"]
    config = converter.read_config(parse(CONFIG_MODULE + EVERY_KEY, *flags))
    assert config == dataclasses.replace(EVERY_VALUE, fqns=["a", "b"], token_group_alignment=16, emulate=False)


def test_a_mistyped_key_is_named(parse):
    with pytest.raises(ValueError, match=r"Invalid field names in .*FP8MoE.*\{'fqn'\}"):
        parse(CONFIG_MODULE + '[fp8moe]\nfqn = ["experts"]\n')


def test_a_mistyped_flag_is_named(parse, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(CONFIG_MODULE, "--fp8moe.fqn=experts")
    assert exit_info.value.code != 0
    assert "--fp8moe.fqn=experts" in capsys.readouterr().err


# torchtitan lets each of these pass, at most with a warning about types.
@pytest.mark.filterwarnings("ignore:The field `fp8moe")
@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (
            'recipe = "rowise"',
            ValueError,
            "fp8moe.recipe must be one of ('rowwise', 'rowwise_with_gw_hp'), got 'rowise'",
        ),
        ('fqns = "experts"', TypeError, "fp8moe.fqns must be a list of non-empty strings, got 'experts'"),
        ("fqns = []", ValueError, "fp8moe.fqns is empty"),
        ("exclude_fqns = [0]", TypeError, "fp8moe.exclude_fqns must be a list of non-empty strings, got [0]"),
        ("token_group_alignment = 12", ValueError, "fp8moe.token_group_alignment must be one of (1, 16, 32), got 12"),
        ('token_group_alignment = "16"', TypeError, "fp8moe.token_group_alignment must be of type int, got '16'"),
        ("round_scales_to_power_of_2 = 1", TypeError, "round_scales_to_power_of_2 must be of type bool, got 1"),
        ("fast_accum = true", ValueError, "fp8moe.fast_accum must be one of ('all', 'forward', 'none'), got True"),
        ('gemm_backend = "cutlass"', ValueError, "fp8moe.gemm_backend must be one of ('auto', "),
        ('emulate = "false"', TypeError, "fp8moe.emulate must be of type bool, got 'false' of type str"),
    ],
)
def test_a_wrong_value_from_toml_is_refused(parse, line, error, message):
    job_config = parse(f"{CONFIG_MODULE}[fp8moe]\n{line}\n")
    with pytest.raises(error, match=re.escape(message)):
        converter.read_config(job_config)


def _texts_under_fields() -> dict[str, str]:
    tree = ast.parse(Path(job_config_module.__file__).read_text())
    section = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FP8MoE")
    return {
        field.target.id: text.value.value
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def test_help_shows_the_text_under_each_field(capsys):
    with pytest.raises(SystemExit) as exit_info:
        ConfigManager().parse_args(["--job.custom_config_module=titan_fp8moe.job_config", "--help"])
    assert exit_info.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    texts = _texts_under_fields()
    assert texts.keys() == {field.name for field in fields(FP8MoE)}
    for name, text in texts.items():
        flag = f"--fp8moe.{name.replace('_', '-')}"
        option = help_text[help_text.index(flag) :]
        text = " ".join(text.split())
        assert text and text in option, f"{flag} lacks: {text}"

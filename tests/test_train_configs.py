"""The TOMLs under train_configs, and the tokenizer and corpus that the debug ones name."""

import json
import sys
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8moe import FP8MoE, __main__, training_run

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
TOKENIZER = ROOT / "tests" / "assets" / "tokenizer"
CORPUS = ROOT / "tests" / "assets" / "corpus" / "corpus.jsonl"


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    # The debug TOMLs name their assets from the repository root. Their shim would patch this process.
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "titan_fp8moe.cpu", types.ModuleType("titan_fp8moe.cpu"))


def load(name: str) -> dict:
    return tomllib.loads((ROOT / "train_configs" / name).read_text())


def test_there_are_a_control_and_three_fp8_configs():
    assert CONFIGS == [
        "llama4_17bx128e_fp8moe.toml",
        "llama4_17bx16e_fp8moe.toml",
        "llama4_debug_bf16.toml",
        "llama4_debug_fp8moe.toml",
    ]


def test_debug_configs_differ_in_the_converter_alone():
    control, fp8 = load("llama4_debug_bf16.toml"), load("llama4_debug_fp8moe.toml")
    assert control["model"].pop("converters") == []
    assert fp8["model"].pop("converters") == ["fp8moe"]
    fp8.pop("fp8moe")
    for config in (control, fp8):
        config["job"].pop("description")
    assert fp8 == control


@pytest.mark.parametrize("name", CONFIGS)
def test_torchtitan_reads_what_the_toml_says(name):
    def assert_same(section, said, path):
        for key, value in said.items():
            actual = getattr(section, key)
            if isinstance(value, dict):
                assert_same(actual, value, f"{path}{key}.")
            else:
                assert actual == value, f"{path}{key}"

    assert_same(ConfigManager().parse_args(["--job.config_file", f"train_configs/{name}"]), load(name), "")


@pytest.mark.parametrize("name", [name for name in CONFIGS if "fp8moe" in name])
def test_fp8_configs_pass_the_check(name, capsys):
    assert __main__.check(f"train_configs/{name}", []) == 0
    lines = capsys.readouterr().out.splitlines()
    model = load(name)["model"]
    experts = 48 if model["flavor"] == "17bx16e" else 24 if model["flavor"] == "17bx128e" else 3
    assert f"llama4 {model['flavor']}: {experts}/{experts} expert modules" in lines
    assert lines[-1] == "OK"


def test_control_passes_the_check_once_it_has_the_converter(capsys):
    assert __main__.check("train_configs/llama4_debug_bf16.toml", []) == 1
    assert 'model.converters does not contain "fp8moe"' in capsys.readouterr().out
    assert __main__.check("train_configs/llama4_debug_bf16.toml", ["--model.converters=fp8moe"]) == 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if "17b" in name])
def test_cluster_configs_show_every_key_with_its_default(name):
    assert load(name)["fp8moe"] == vars(FP8MoE())


@pytest.mark.parametrize("name", [name for name in CONFIGS if "17b" in name])
def test_cluster_configs_compile_and_name_their_limit(name):
    job_config = ConfigManager().parse_args(["--job.config_file", f"train_configs/{name}"])
    assert training_run.compile_backend_of(job_config) == "inductor"
    assert job_config.activation_checkpoint.mode == "full"
    header = (ROOT / "train_configs" / name).read_text().split("\n\n")[0]
    assert "It has not been run by us" in header


# ---- assets ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(TOKENIZER))


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]


def test_every_token_is_inside_the_debug_models_embedding(tokenizer):
    args = get_train_spec("llama4").model_args["debugmodel"]
    largest = max(Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab().values())
    assert largest < args.vocab_size == 2048


def test_special_tokens_are_what_torchtitan_appends(tokenizer):
    # torchtitan's text loader ends each document with eos.
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None and tokenizer.bos_id != tokenizer.eos_id
    ids = tokenizer.encode("In the beginning", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids[1:-1])


@pytest.mark.parametrize(
    "text", ["In the beginning was the Word.", "naïve café, 100 €\n\ttabs  and spaces", "日本語 🙂 \x00"]
)
def test_any_text_comes_back_from_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text


def test_corpus_comes_back_from_the_tokenizer_and_is_compressed_by_it(tokenizer, documents):
    num_tokens = 0
    for document in documents[::25]:
        ids = tokenizer.encode(document, add_bos=False, add_eos=False)
        assert tokenizer.decode(ids) == document
        num_tokens += len(ids)
    assert sum(map(len, documents[::25])) / num_tokens > 2.5, "characters a token: a tokenizer of bytes has 1"


def test_corpus_is_some_hundred_kilobytes_of_distinct_documents(documents):
    assert 200_000 <= CORPUS.stat().st_size <= 1_000_000
    assert len(set(documents)) == len(documents) > 100
    assert all(len(document) >= 300 for document in documents)

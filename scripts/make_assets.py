"""Make tests/assets: a corpus cut from two public-domain texts, and a tokenizer trained on it.

    python scripts/make_assets.py jargon-4.4.7.txt.gz kjv.txt.gz

The same inputs give the same files, byte for byte, with one release of `tokenizers`.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parents[1] / "tests" / "assets"
VOCAB_SIZE = 2048  # of torchtitan's debug models: a larger id would be outside their embedding
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BYTES_PER_TEXT = 200_000


def read(path: Path) -> str:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as f:
        return f.read()


def jargon_entries(text: str) -> list[str]:
    """One document an entry, hard-wrapped paragraphs joined."""
    lexicon = text.partition("\n   :")[2].partition("Part III. Appendices")[0]
    entries = []
    for entry in lexicon.split("\n   :"):
        # A letter on its own line opens the index of the next letter's headwords: not prose.
        entry = re.split(r"\n {0,3}[A-Z]\n", entry)[0]
        headword, *paragraphs = re.split(r"\n\s*\n", entry.strip())
        joined = [
            p if re.search(r"^ {4}", p, re.MULTILINE) else re.sub(r"\s*\n\s*", " ", p.strip()) for p in paragraphs
        ]
        entries.append("\n\n".join([re.sub(r"\s+", " ", headword), *joined]))
    return [entry for entry in entries if 300 <= len(entry) <= 5000]


def kjv_chapters(text: str) -> list[str]:
    """One document a chapter, without the verse numbers."""
    verses = (line.split(" ", 1) for line in text.splitlines())
    by_chapter = groupby(verses, key=lambda verse: verse[0].split(":")[0])
    return [" ".join(words for _, words in chapter) for _, chapter in by_chapter]


def spread(documents: list[str], size: int) -> list[str]:
    """About `size` bytes of documents, taken evenly from the whole text."""
    total = sum(len(d.encode()) for d in documents)
    return documents[:: -(-total // size)]


def mix(a: list[str], b: list[str]) -> Iterator[str]:
    """Both in step by bytes, so that any stretch of the corpus holds about as much of each."""
    rest, taken = [a[::-1], b[::-1]], [0, 0]
    while any(rest):
        i = min((i for i in (0, 1) if rest[i]), key=lambda i: taken[i])
        document = rest[i].pop()
        taken[i] += len(document.encode())
        yield document


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # any text encodes
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jargon", type=Path, help="the Jargon File 4.4.7, plain text or .gz")
    parser.add_argument("kjv", type=Path, help="the King James Version, a verse a line, or .gz")
    args = parser.parse_args()

    documents = list(
        mix(
            spread(jargon_entries(read(args.jargon)), BYTES_PER_TEXT),
            spread(kjv_chapters(read(args.kjv)), BYTES_PER_TEXT),
        )
    )
    corpus = ASSETS / "corpus" / "corpus.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents]
    corpus.write_text("".join(rows), encoding="utf-8")

    tokenizer = train_tokenizer(documents)
    folder = ASSETS / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(documents))
    print(f"{corpus}: {len(documents)} documents, {corpus.stat().st_size:,} bytes, {tokens:,} tokens")
    print(f"{folder}: vocabulary {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()

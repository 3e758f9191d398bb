"""Token ids for `ninfer-bench --corpus`, from the texts of `bench/corpus` and a model's own tokenizer.

    python -m bench.make_corpus MODEL OUT.ids [--tokens 65536] [--text FILE ...]

Writes decimal ids, and `OUT.json`, which says what they are. No chat template, no special tokens; the texts
follow one another and begin again until there are enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from ninfer.api.loading import load_frontend, opened

_TEXTS = Path(__file__).parent / "corpus"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--text", type=Path, nargs="*", help="UTF-8 files in place of bench/corpus")
    options = parser.parse_args(argv)
    texts = options.text or sorted(path for path in _TEXTS.rglob("*.txt"))
    if not texts:
        parser.error(f"{_TEXTS} has no texts; name some with --text")
    with opened(options.model, None, None) as model:
        frontend = load_frontend(model)
        name = str(model.metadata.get("name") or Path(options.model).stem)
        model.close()
    ids: list[int] = []
    used: list[Path] = []
    while len(ids) < options.tokens:
        before = len(ids)
        for path in texts:
            if len(ids) < options.tokens:
                ids += frontend.encode(path.read_text(encoding="utf-8"))
                used += [path] * (path not in used)
        if len(ids) == before:
            parser.error("the texts have no tokens")
    ids = ids[: options.tokens]
    text = "\n".join(" ".join(map(str, ids[i : i + 16])) for i in range(0, len(ids), 16)) + "\n"
    options.out.write_text(text, encoding="ascii")
    manifest = {
        "artifact_type": "ninfer_bench_corpus",
        "schema_version": 1,
        "tokenizer_source": str(options.model),
        "tokenizer_model_id": name,
        "add_special_tokens": False,
        "chat_template": False,
        "tokens": options.out.name,
        "token_count": len(ids),
        "ids_sha256": sha256(text.encode()).hexdigest(),
        "source": "bench/corpus" if not options.text else "files",
        "source_files": [path.name for path in used],
        "note": "texts one after the other, from the first again where they end",
    }
    options.out.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(ids)} ids of {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

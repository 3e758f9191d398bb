"""ninfer-nano: corpus, tokenizer, training and export of the small checkpoint that the tests use.

See README.md in this folder for the commands.

| file | holds |
|---|---|
| `geometry.py` | the model's sizes, and its config |
| `corpus.py`, `sources.py` | texts; with `fetch.py`, `readers.py`, `pages.py`, `overlap.py`, `credits.py` |
| `heldout.py` | perplexity texts out of what was held out |
| `tokenizer.py` (`samples.py`), `tokenizer/` | training of the tokenizer; the committed one |
| `mix.py`, `documents.py`, `batches.py`, `packing.py` | from texts and tasks to a step's tokens |
| `model.py` (`delta.py`), `muon.py`, `quantized.py` | forward pass, optimizer, NVFP4 in training |
| `legs.py`, `train.py`, `evaluate.py` | the whole training, a leg of it, what it reached |
| `recursion.py` | further training of the MTP layer, for drafts of several tokens |
| `plot.py`, `runs/` | loss curves; the logs of the training that was run |
| `check.py`, `proof.py` | on the GPU, before training |
| `shards.py`, `checkpoint.py` | what the training writes; the Hugging Face folder |
| `export.py` (`rebuild.py`, `gguf_writer.py`, `kquants.py`) | the shipped artifact, and all made from it |
| `commands.py` | errors of all commands |
"""

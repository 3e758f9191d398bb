"""ninfer-nano: corpus, tokenizer, training and export of the small checkpoint that the tests use.

See README.md in this folder for the two commands.
"""

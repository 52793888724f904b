"""Texts for all-MiniLM-L6-v2: the codec beside the token tensors, with the model's own tokenizer.

Apart from the model's code: that imports a library of models, which takes seconds and is not needed to serve.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

Arrays = Mapping[str, Any]


class Text:
    """Takes `text`, one an embedding; longer ones are cut at `max_length` tokens, as the model was trained."""

    inputs = ({"name": "text", "datatype": "BYTES", "shape": ["batch"]},)

    def __init__(self, tokenizer: str, max_length: int = 256) -> None:
        self._tokenizer = Tokenizer.from_file(tokenizer)
        self._tokenizer.enable_truncation(max_length)
        self._tokenizer.enable_padding()

    def encode(self, inputs: Arrays) -> Arrays:
        """Return token ids and mask [batch, sequence], padded to the longest text."""
        found = self._tokenizer.encode_batch([text.decode() for text in inputs["text"]])
        if not found:
            raise ValueError("there is no text")
        return {
            "input_ids": np.array([one.ids for one in found], np.int64),
            "attention_mask": np.array([one.attention_mask for one in found], np.int64),
        }

    def samples(self) -> Sequence[Arrays]:
        """Return two texts of unlike length, so that one of them is padded."""
        return [{"text": ["Ready?", "A pod that is called ready answers its first request as fast as its last."]}]

"""The vectors of the example's sentences as sentence-transformers gives them: `python …_reference.py MODEL OUT`.

Run in an environment of its own (`make sentences`): it brings libraries that nothing here needs.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer

SENTENCES = Path(__file__).with_name("sentences.json")


def main(model: str, out: str) -> None:
    """Write the vectors, one a sentence, each computed alone."""
    texts = json.loads(SENTENCES.read_text())
    library = SentenceTransformer(model, device="cpu")
    vectors = np.stack([library.encode(text) for text in texts]).astype(np.float32)
    save_file({"embedding": vectors}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

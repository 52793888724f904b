"""The example's texts on a real server: their vectors are those of sentence-transformers."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from safetensors.numpy import load_file

from tests.e2e.conftest import JSON, Start
from tests.e2e.harness import ROOT
from tests.e2e.test_codec import asked

PYTHON = ROOT / ".cache/sentences/bin/python"
HERE = Path(__file__).parent
# Sentences in many languages, and their vectors as the sentence-transformers library gives them.
SENTENCES = HERE / "sentences.json"
VECTORS = HERE / "sentences.safetensors"
TEXTS: list[str] = json.loads(SENTENCES.read_text())


def test_the_examples_vectors_of_texts_are_those_of_sentence_transformers(start: Start, minilm_config: JSON) -> None:
    server = start(minilm_config)
    server.wait()
    expected = load_file(VECTORS)["embedding"]

    status, body = server.post("/v2/models/minilm/infer", asked(TEXTS))
    assert status == 200, body
    together = json.loads(body)["outputs"][0]
    alone = [json.loads(server.post("/v2/models/minilm/infer", asked([text]))[1])["outputs"][0] for text in TEXTS]
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        sent = tritonclient.http.InferInput("text", [len(TEXTS)], "BYTES")
        raw = client.infer("minilm", [sent.set_data_from_numpy(np.array(TEXTS, object))]).as_numpy("embedding")

    assert (len(TEXTS) >= 20, together["shape"]) == (True, [len(TEXTS), 384])
    for vectors in (together["data"], [one["data"] for one in alone], raw):
        assert np.abs(np.array(vectors, np.float32).reshape(expected.shape) - expected).max() < 1e-4
    stages = {stage["name"]: stage for stage in server.status()["stages"]}
    assert stages["prove-codec"]["state"] == "done"
    assert (
        server.infer("minilm", {"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)})[0]
        == 200
    )


@pytest.mark.slow
def test_the_kept_vectors_are_what_sentence_transformers_gives(tmp_path: Path) -> None:
    assert PYTHON.exists(), "make sentences makes the environment of sentence-transformers"
    subprocess.run([PYTHON, HERE / "sentences_reference.py", ROOT / ".venv/model", tmp_path / "vectors"], check=True)

    np.testing.assert_allclose(load_file(tmp_path / "vectors")["embedding"], load_file(VECTORS)["embedding"], atol=1e-6)

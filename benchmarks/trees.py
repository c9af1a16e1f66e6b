"""Shapes of the models that the benchmarks step."""

import math

Shape = tuple[int, ...]


def gpt2() -> list[Shape]:
  """GPT-2 small, 124M parameters, 148 leaves."""
  d, layers, vocabulary, context = 768, 12, 50304, 1024
  shapes: list[Shape] = [(vocabulary, d), (context, d), (d,), (d,)]
  for _ in range(layers):
    shapes += [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
  return shapes


def llama(fraction: int = 1) -> list[Shape]:
  """A 1.1B-parameter Llama, 147 leaves; ``fraction`` divides its widths' product."""
  d, layers, vocabulary, f = 2048, 16, 32000 // fraction, 8192 // fraction
  shapes: list[Shape] = [(vocabulary, d), (vocabulary, d), (d,)]
  for _ in range(layers):
    k = d // fraction
    shapes += [(d,), (d,), (d, k), (d, k // 4), (d, k // 4), (k, d), (d, f), (d, f), (f, d)]
  return shapes


def many() -> list[Shape]:
  return [(64, 64)] * 290


def odd() -> list[Shape]:
  """Last axes that no block fits: a vocabulary of 50257, convolutions, odd widths."""
  shapes: list[Shape] = [(768, 50257), (50257, 769)]
  for c in (64, 128, 256, 512):
    shapes += [(3, 3, c, 2 * c), (3, 3, 2 * c, 2 * c), (1, 1, c, 2 * c), (7, 7, 3, c), (2 * c,)]
  return [*shapes, (1601, 1280), (1000, 4099)]


TREES = {
    "llama1b": llama,
    "llama100m": lambda: llama(10),
    "gpt2": gpt2,
    "many": many,
    "odd": odd,
    "50m": lambda: [(4096, 4096), (4096, 4096), (2048, 4096), (2048, 4096), (4096,), (4096,)],
}


def count(shapes: list[Shape]) -> int:
  return sum(math.prod(s) for s in shapes)

"""Text to train on that every machine has, as tokens: Python sources, and a vocabulary made from them.

The sources are the standard library's and those of the installed packages, in the order of a hash of their paths,
until there are enough; files with the same content count once, and every 24th file is held out for evaluation. A token
is one of the 256 bytes or one of the most frequent pieces of the text for training: a line break with the indentation
after it, a part of an identifier (a capital starts a new one), up to three digits, or a run of punctuation, each with
the space before it. Pieces without a token are spelt in bytes. A zero byte ends each file.

    python benchmarks/corpus.py --out corpus.npz
"""

import argparse
import collections
from collections.abc import Iterable
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import sys
import sysconfig
import time
from typing import Any

import numpy as np

PIECE = re.compile(rb"\n[ \t]*| ?(?:[A-Z]?[a-z]+|[A-Z]+|[0-9]{1,3}|[^\sA-Za-z0-9]+)|\s")
HELD_OUT_EVERY = 24
# Larger ones are tables and generated code.
LARGEST_FILE = 300_000
END = 0
# Shares of the work. Fixed, as the order of the text must not depend on the number of processes.
PARTS = 16


def sources(megabytes: float) -> list[bytes]:
  """Texts of files, the standard library's first."""
  stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
  installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
  installed.update(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
  packages = {"site-packages", "dist-packages", "__pycache__"}
  digest = lambda text: hashlib.sha256(text).digest()
  texts: list[bytes] = []
  seen: set[bytes] = set()
  left = megabytes * 1e6
  for root in [stdlib, *sorted(pathlib.Path(p) for p in installed)]:
    names = [(str(f.relative_to(root)), f) for f in root.rglob("*.py")]
    if root == stdlib:
      names = [(name, f) for name, f in names if packages.isdisjoint(f.relative_to(root).parts)]
    for _, f in sorted(names, key=lambda x: digest(x[0].encode(errors="replace"))):
      if left <= 0:
        return texts
      try:
        text = f.read_bytes()
      except OSError:  # a dangling link
        continue
      mark = digest(text)
      if not 64 <= len(text) <= LARGEST_FILE or mark in seen:
        continue
      seen.add(mark)
      texts.append(text.replace(b"\0", b""))
      left -= len(text)
  if not texts:
    raise SystemExit(f"no Python sources in {stdlib}")
  return texts


def count_pieces(texts: Iterable[bytes]) -> collections.Counter[bytes]:
  counts: collections.Counter[bytes] = collections.Counter()
  for text in texts:
    counts.update(PIECE.findall(text))
  return counts


def encode(texts: Iterable[bytes], numbers: dict[bytes, int]) -> np.ndarray:
  out: list[int] = []
  for text in texts:
    for piece in PIECE.findall(text):
      number = numbers.get(piece)
      if number is None:
        out.extend(piece)
      else:
        out.append(number)
    out.append(END)
  return np.asarray(out, np.uint16)


class _Shared:
  """What the forked processes inherit: sending it to them would take longer than their work."""

  texts: tuple[list[bytes], ...] = ()
  numbers: dict[bytes, int] = {}  # noqa: RUF012


def _count_part(i: int) -> collections.Counter[bytes]:
  return count_pieces(_Shared.texts[i])


def _encode_part(i: int) -> np.ndarray:
  return encode(_Shared.texts[i], _Shared.numbers)


def _parallel(function: Any, n: int, processes: int) -> list[Any]:
  if processes == 1:
    return [function(i) for i in range(n)]
  # A pool of its own for each pass, forked after what that pass reads was made.
  context = multiprocessing.get_context("fork")
  with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
    return list(pool.map(function, range(n)))


def build(vocabulary: int, megabytes: float, processes: int = 1) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
  """Tokens for training, tokens for evaluation, and what they are made of."""
  if not 256 < vocabulary <= 1 << 16:
    raise ValueError(f"a vocabulary has 257 to 65536 tokens, not {vocabulary}")
  texts = sources(megabytes)
  held_out = texts[::HELD_OUT_EVERY]
  del texts[::HELD_OUT_EVERY]
  _Shared.texts = (*(texts[i::PARTS] for i in range(PARTS)), held_out)
  total: collections.Counter[bytes] = collections.Counter()
  for counts in _parallel(_count_part, PARTS, processes):
    total.update(counts)
  # Ties by the piece itself: the vocabulary must not depend on the order of counting.
  pieces = sorted((x for x in total if len(x) > 1), key=lambda x: (-total[x], x))[: vocabulary - 256]
  _Shared.numbers = {piece: 256 + i for i, piece in enumerate(pieces)}
  _Shared.numbers.update({bytes([i]): i for i in range(256)})
  *parts, evaluation = _parallel(_encode_part, PARTS + 1, processes)
  training = np.concatenate(parts)
  size = lambda files: sum(len(x) + 1 for x in files)
  about = {
      "training": {"files": len(texts), "bytes": size(texts), "tokens": len(training)},
      "evaluation": {"files": len(held_out), "bytes": size(held_out), "tokens": len(evaluation)},
      "vocabulary": vocabulary,
      "vocabulary_used": 256 + len(pieces),
      "least_frequent": total[pieces[-1]] if pieces else 0,
      "sha256": hashlib.sha256(training.tobytes() + evaluation.tobytes()).hexdigest(),
  }
  return training, evaluation, about


def load(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
  with np.load(path) as file:
    return file["training"], file["evaluation"], json.loads(str(file["about"]))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--vocabulary", type=int, default=50304)
  parser.add_argument("--megabytes", type=float, default=100)
  parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
  parser.add_argument("--out", required=True, help="an npz file")
  args = parser.parse_args()
  start = time.perf_counter()
  training, evaluation, about = build(args.vocabulary, args.megabytes, args.processes)
  np.savez(args.out, training=training, evaluation=evaluation, about=json.dumps(about))
  print(json.dumps(about | {"seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
  main()

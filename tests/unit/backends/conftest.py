"""Tiny models on one thread: on a busy machine several threads only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

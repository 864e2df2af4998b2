"""Options of a benchmark that takes published models with random weights, on cores or on a GPU."""

import argparse
from typing import get_args

from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.families.hf_vlm.parts import Placement, Precision


def add_published(parser: argparse.ArgumentParser) -> None:
    """Let a parser take which, where they compute, and in which numbers."""
    parser.add_argument("--published", choices=tuple(CONFIGS), action="append", help="these instead; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it computes (default cpu)")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32", help="of a published one")


def kept_of(options: argparse.Namespace) -> Placement:
    """How they are kept."""
    return Placement(options.dtype, options.device)

"""Command-line options for published models with random weights, on CPU or GPU."""

import argparse
from typing import get_args

from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.families.hf_vlm.parts import Placement, Precision


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--published", choices=tuple(CONFIGS), action="append", help="measure this model; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32", help="of a published model")


def placement_of(options: argparse.Namespace) -> Placement:
    return Placement(options.dtype, options.device)

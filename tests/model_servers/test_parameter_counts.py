"""Parameter counts of multimodal models equal those of the papers."""

import pytest
import torch
from torch import nn

from trimtab_model_servers.families import av_hubert, self_mm, tbn, tvlt, vilt
from trimtab_model_servers.families.tbn import BnInception


def millions(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) / 1e6


@pytest.mark.parametrize(
    ("construct", "expected"),
    [
        (lambda: vilt.Vilt(vilt.ViltParameters()).model, 111.6),
        (lambda: tvlt.Tvlt(tvlt.TvltParameters()), 87.3),
        (lambda: tbn.Tbn(tbn.TbnParameters()), 32.64),
        (lambda: BnInception(3), 10.27),
        (lambda: self_mm.SelfMm(self_mm.SelfMmParameters()).bert, 109.48),
        (lambda: without_head(av_hubert.AvHubert("base", av_hubert.AvHubertParameters())), 102.6),
        (lambda: without_head(av_hubert.AvHubert("large", av_hubert.AvHubertParameters())), 324.6),
    ],
    ids=["vilt", "tvlt", "tbn", "bn-inception", "self-mm", "av-hubert-base", "av-hubert-large"],
)
def test_model_size_equals_the_published_one(construct, expected):
    with torch.device("meta"):
        assert millions(construct()) == pytest.approx(expected, abs=0.06)


def without_head(network):
    network.head = nn.Identity()
    return network
